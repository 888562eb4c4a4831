"""llama.cpp over HTTP, with its look-up in the prompt or without: python -m benchmarks.peers.llama_cpp --help.

Its Python binding's own server takes texts only, so the peer answers ``POST /v1/completions`` with token ids here, one
request at a time, through the binding's ``Llama.generate``: the same sampling, the same ``LlamaPromptLookupDecoding``.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

LOOKUP_TOKENS = 10
"""The default of the binding."""


def write_gguf(model: Path, file: Path) -> None:
    """A Llama of Hugging Face's format as GGUF in float32. Runs in the peer's environment."""
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((model / "config.json").read_text())
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{token_id}" for token_id in range(config["vocab_size"])])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        values = tensor.astype(np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # Its rotary embedding turns neighbours, transformers' turns halves of a head.
            heads = num_heads if "q_proj" in name else num_kv_heads
            rows, columns = values.shape
            values = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _Peer:
    """The model, which generates one answer at a time."""

    def __init__(self, file: Path, *, num_threads: int, context_tokens: int, lookup: bool) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._llama = Llama(
            model_path=str(file),
            n_ctx=context_tokens,
            n_batch=context_tokens,
            n_threads=num_threads,
            n_threads_batch=num_threads,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if lookup else None,
            verbose=False,
        )

    def answer(self, prompt: list[int], *, max_tokens: int, temperature: float, seed: int) -> list[int]:
        """Generate token ids, without stop conditions."""
        self._llama.set_seed(seed)
        self._llama.reset()
        tokens = self._llama.generate(prompt, temp=temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
        said: list[int] = []
        for token in tokens:
            said.append(int(token))
            if len(said) == max_tokens:
                break
        return said


def _handler(peer: _Peer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send({"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = peer.answer(
                body["prompt"], max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"]
            )
            text = " ".join(f"w{token_id}" for token_id in said)
            self._send({"choices": [{"text": text}], "usage": {"completion_tokens": len(said)}})

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a line for each request would cost time."""

        def _send(self, answer: object) -> None:
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


def main() -> None:
    """Serve a model until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--lookup", action="store_true")
    args = parser.parse_args()
    file = args.model.with_suffix(".gguf")
    if not file.exists():
        write_gguf(args.model, file)
    peer = _Peer(file, num_threads=args.threads, context_tokens=args.context, lookup=args.lookup)
    HTTPServer(("127.0.0.1", args.port), _handler(peer)).serve_forever()


if __name__ == "__main__":
    main()
