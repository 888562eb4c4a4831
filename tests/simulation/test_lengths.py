"""The lengths of recorded requests: as they were, or divided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulation.whatif.parts import Part
from simulation.whatif.recorded import RecordedRequest, RecordedSource
from simulation.whatif.source import TraceSource


@pytest.mark.parametrize(("num_output", "scale", "simulated"), [(1, 1, 1), (1, 4, 1), (5, 4, 2), (12, 4, 3)])
def test_an_answer_of_one_token_stays_one(tmp_path: Path, num_output: int, scale: int, simulated: int) -> None:
    request = RecordedRequest(at_s=0.0, num_prompt_tokens=1, num_output_tokens=num_output, other_outputs=[num_output])
    rows = (
        {"t": 0, "prompt_tokens": 1, "output_tokens": num_output},
        {"timestamp": 0, "input_length": 1, "output_length": num_output, "hash_ids": [1]},
    )
    (file := tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    (recorded,) = RecordedSource(requests=[request], part=Part(scale=scale)).load()
    plain, mooncake = TraceSource(file=file, scale=scale).load()

    assert recorded.other_outputs == [simulated]
    for arrival in (recorded, plain, mooncake):
        assert (len(arrival.prompt), arrival.num_output_tokens) == (1, simulated)
