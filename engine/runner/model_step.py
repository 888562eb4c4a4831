"""A launched step of the model, until its result is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine.contract.messages import LogprobTable
from engine.contract.step import (
    EMPTY_INTS,
    BeamCandidates,
    BoolArray,
    ModelRunnerOutput,
    PromptLogprobsChunk,
    SampledLogprobs,
    SchedulerOutput,
)
from engine.device.copies import Download
from engine.runner.input_batch import InputBatch
from engine.runner.prompt_logprobs import PromptLogprobsOnDevice
from engine.runner.step_inputs import StepInputs
from engine.sampling.sampler import SampledTokens
from engine.sampling.verification import count_accepted, is_output

EMPTY_BOOLS: Final[BoolArray] = np.empty(0, dtype=np.bool_)


class ModelStep:
    """Implements ``PendingStep``. Its tokens are on the device at once, and in the batch after ``settle``."""

    def __init__(
        self,
        output: SchedulerOutput,
        inputs: StepInputs,
        batch: InputBatch,
        *,
        device: torch.device,
        sampled: SampledTokens | None,
        prompt_logprobs: Sequence[PromptLogprobsOnDevice],
        has_waited: bool,
    ) -> None:
        self.rows = inputs.sampled_rows
        self.positions = inputs.sampled_positions
        self.is_settled = False
        self._num_samples = output.num_samples
        self._draft_token_ids = output.draft_token_ids
        self._batch = batch
        self._sampled = sampled
        self._prompt_logprobs = prompt_logprobs
        self._has_waited = has_waited
        tensors: list[torch.Tensor] = []
        if sampled is not None:
            tensors += (sampled.token_ids, sampled.has_nan, *(sampled.logprobs or ()), *(sampled.candidates or ()))
        for chunk in prompt_logprobs:
            tensors += chunk.table
        self._download = Download(tensors, device)
        self._arrays: list[npt.NDArray[np.generic[Any]]] = []

    @property
    def token_ids(self) -> torch.Tensor:
        """[num_samples] the tokens sampled for ``rows``, on the device."""
        assert self._sampled is not None
        return self._sampled.token_ids

    def settle(self) -> None:
        """Wait until the step is done, and add its tokens to the batch. Idempotent."""
        if self.is_settled:
            return
        self._arrays = self._download.wait()
        self.is_settled = True
        token_ids = self._arrays[0].view(np.int32) if self._sampled is not None else EMPTY_INTS
        self._batch.learn(self.rows, self.positions, token_ids)

    def result(self) -> ModelRunnerOutput:
        """See ``PendingStep``."""
        self.settle()
        arrays = iter(self._arrays)
        logprobs, candidates = None, None
        token_ids, has_nan = EMPTY_INTS, EMPTY_BOOLS
        if self._sampled is not None:
            token_ids, has_nan = next(arrays).view(np.int32), next(arrays).view(np.bool_)
            if self._sampled.logprobs is not None:
                logprobs = SampledLogprobs(rows=self._sampled.logprob_rows, table=_table(arrays))
            if self._sampled.candidates is not None:
                candidates = BeamCandidates(
                    rows=self._sampled.candidate_rows,
                    token_ids=next(arrays).view(np.int32),
                    logprobs=next(arrays).view(np.float32),
                )
        num_accepted = None
        if self._draft_token_ids.size:
            num_accepted = count_accepted(token_ids, self._num_samples, self._draft_token_ids)
            has_nan = has_nan & is_output(self._num_samples, num_accepted)
        return ModelRunnerOutput(
            sampled_token_ids=token_ids,
            num_accepted=num_accepted,
            has_nan=has_nan,
            logprobs=logprobs,
            prompt_logprobs=tuple(
                PromptLogprobsChunk(row=chunk.row, start=chunk.start, table=_table(arrays))
                for chunk in self._prompt_logprobs
            ),
            has_waited=self._has_waited,
            failures=tuple(self._sampled.failures) if self._sampled is not None else (),
            candidates=candidates,
        )


def _table(arrays: Iterator[npt.NDArray[np.generic[Any]]]) -> LogprobTable:
    return LogprobTable(
        token_ids=next(arrays).view(np.int32), logprobs=next(arrays).view(np.float32), ranks=next(arrays).view(np.int32)
    )
