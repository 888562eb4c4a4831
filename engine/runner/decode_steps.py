"""Several decode steps in one step: each computes the token that the one before it sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.contract.messages import LogprobTable
from engine.contract.step import (
    EMPTY_INTS,
    BoolArray,
    IntArray,
    ModelRunnerOutput,
    PendingStep,
    SampledLogprobs,
    SchedulerOutput,
)


def run_decode_steps(launch: Callable[[SchedulerOutput], PendingStep], output: SchedulerOutput) -> ModelRunnerOutput:
    """Run a step that consists of several decode steps one by one, and combine the sampled tokens row by row."""
    num_steps, num_rows = output.num_decode_steps, output.rows.size
    ones: IntArray = np.ones(num_rows, np.int32)
    step = output._replace(num_scheduled_tokens=ones, num_samples=ones, is_decode=True, num_decode_steps=1)
    results: list[ModelRunnerOutput] = []
    for _ in range(num_steps):
        result = launch(step).result()
        # The next step may reuse the memory of these sampled tokens.
        results.append(result._replace(sampled_token_ids=result.sampled_token_ids.copy()))
        step = step._replace(
            first_positions=step.first_positions + np.int32(1),
            released_rows=EMPTY_INTS,
            new_rows=(),
            append_rows=EMPTY_INTS,
            append_columns=EMPTY_INTS,
            append_block_ids=EMPTY_INTS,
            append_groups=EMPTY_INTS,
            finished_request_ids=(),
        )
    return ModelRunnerOutput(
        sampled_token_ids=np.stack([result.sampled_token_ids for result in results], axis=1).reshape(-1),
        num_accepted=np.full(num_rows, num_steps - 1, np.int32),
        has_nan=_has_nan(results, num_rows),
        logprobs=_logprobs(results, output.rows),
        has_waited=any(result.has_waited for result in results),
    )


def _has_nan(results: Sequence[ModelRunnerOutput], num_rows: int) -> BoolArray | None:
    if all(result.has_nan is None for result in results):
        return None
    none: BoolArray = np.zeros(num_rows, np.bool_)
    return np.stack([none if result.has_nan is None else result.has_nan for result in results], axis=1).reshape(-1)


def _logprobs(results: Sequence[ModelRunnerOutput], rows: IntArray) -> SampledLogprobs | None:
    """Log-probabilities of each row, in the order of its samples."""
    found = [result.logprobs for result in results if result.logprobs is not None]
    if not found:
        return None
    owners = np.concatenate([logprobs.rows for logprobs in found])
    places = {row: place for place, row in enumerate(rows.tolist())}
    order = np.argsort([places[row] for row in owners.tolist()], kind="stable")
    columns = zip(*(logprobs.table for logprobs in found), strict=True)
    return SampledLogprobs(rows=owners[order], table=LogprobTable(*(np.concatenate(part)[order] for part in columns)))
