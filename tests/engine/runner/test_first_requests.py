"""The first requests of a worker load nothing: what they need is there once the engine is built."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import sys

from engine.build import build_engine
from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from engine.layers.panel_weight import suits_panels
from engine.model.builtin import builtin_model_dir
from engine.runner.recorded_prompts import MAX_TOKENS

core = build_engine(
    EngineConfig(
        model=ModelConfigSource(path=builtin_model_dir(), device="cpu", num_threads=1),
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(max_model_len=256, max_num_batched_tokens=MAX_TOKENS, max_num_seqs=4),
    )
).core
before = set(sys.modules)
wishes = ({}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}, {"num_logprobs": 3}, {"repetition_penalty": 1.2})
for number, wish in enumerate(wishes):
    core.add_request(
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=TokenIds.of(list(range(number, 100))),
            sampling=SamplingParams(max_tokens=8, ignore_eos=True, **wish),
        )
    )
    while core.has_unfinished():
        core.step()
runner = core.runner.runner
assert bool(runner._recorded.sizes) == suits_panels(runner.dtype), "steps are recorded where we multiply ourselves"
print(*(name for name in set(sys.modules) - before if name != "numpy.ma" and not name.startswith("numpy.ma.")))
"""


def test_the_first_requests_load_no_modules() -> None:
    """Recording the first step loaded torch's compiler: somebody waited 1.4 s, and that step's time counted among the
    first that prices are learnt from. numba loads three modules of ``numpy.ma``, which takes 20 ms."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
