"""OpenVINO GenAI as a peer: python -m benchmarks.peers.openvino_genai MODEL DTYPE NUM_THREADS."""

from __future__ import annotations

import atexit
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.protocol import check_lengths, serve

PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}


def load() -> Callable[[list[list[int]], int], None]:
    """Paged continuous batching with weights, products and KV cache in the dtype asked for."""
    model, dtype, num_threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    import numpy as np
    import openvino
    import openvino_genai
    from optimum.exporters.openvino import main_export

    converted = tempfile.TemporaryDirectory(prefix="baton-openvino-")
    atexit.register(converted.cleanup)  # the pipeline maps its files
    directory = Path(converted.name)
    main_export(model, output=directory, task="text-generation-with-past", convert_tokenizer=True)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    has_bfloat16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    # Without bfloat16 instructions its CPU plugin computes in float32, and refuses a KV cache of another precision.
    precision = PRECISIONS[dtype if has_bfloat16 else "float32"]
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        directory,
        scheduler,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": num_threads,
        },
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        config = openvino_genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        check_lengths([result.m_generation_ids[0] for result in results], num_tokens)

    return generate


if __name__ == "__main__":
    serve(load)
