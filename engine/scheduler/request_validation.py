"""Validation of new requests: one that can never be served is refused at once, with the arithmetic. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from engine.contract.config import SchedulerConfig
from engine.contract.errors import DuplicateRequestError, PromptTooLongError, RequestRefusedError
from engine.contract.grammar import GRAMMAR_REFUSED
from engine.contract.messages import TOO_MANY_BEAMS, BeamParams, FinishReason, GenerateRequest, SamplingParams
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.policy.grammar_gate import GrammarGate
from engine.scheduler.remote.early_loads import EarlyLoads
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.timeline import Timeline

BeamLimit: TypeAlias = Callable[[int, int], int]
"""The most tokens of KV that one output can have, by the numbers of prompt tokens and of beams."""


class RequestValidator:
    """Checks requests and queues those that can be served. A refusal releases the KV that was kept for the request.

    ``max_kv_tokens`` is the length of the longest request that the KV cache holds; None means any length, because
    windows bound what a request holds at a time. ``max_beam_tokens`` says the same for a beam search.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        live_requests: LiveRequests,
        remote: RemoteKV,
        early: EarlyLoads,
        max_model_len: int,
        max_kv_tokens: int | None,
        max_beam_tokens: BeamLimit,
        has_connector: bool,
        grammars: GrammarGate | None,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._live_requests = live_requests
        self._remote = remote
        self._early = early
        self._max_model_len = max_model_len
        self._max_kv_tokens = max_model_len if max_kv_tokens is None else max_kv_tokens
        self._max_beam_tokens = max_beam_tokens
        self._has_connector = has_connector
        self._grammars = grammars
        self._clock = clock
        self._next_arrival_index = 0

    def enter(self, message: GenerateRequest, *, waited_s: float = 0.0) -> None:
        """Queue a request, or take note of one that is announced; a request whose output is complete ends right here.

        ``waited_s``: how long ago it came; commands wait while a step computes. Its time in the queue includes that.

        Raises:
            RequestRefusedError: It cannot be served; its subclasses say more.
        """
        live = self._live_requests.live.get(message.request_id)
        if live is not None:
            if message.kv_transfer is not None and message.kv_transfer != live.message.kv_transfer:
                self._remote.release_params(message.kv_transfer)
            raise DuplicateRequestError(message.request_id)
        try:
            self._check(message)
        except RequestRefusedError:
            self._early.drop(message.request_id)
            if message.kv_transfer is not None:
                self._remote.release_params(message.kv_transfer)
            raise
        request = self._make_request(message, queued_at_s=self._clock() - waited_s)
        grammar = message.sampling.grammar
        if message.kv_stream is not None:
            if grammar is not None and self._grammars is not None:
                self._grammars.announce(request, grammar)
            self._early.add(request, message.kv_stream)
            return
        if grammar is not None and self._grammars is not None:
            self._grammars.enter(request, grammar)
        else:
            self._live_requests.add(request)
        if message.kv_transfer is not None:
            self._remote.expect(message.kv_transfer)
        self._end_if_complete(request)

    def _make_request(self, message: GenerateRequest, *, queued_at_s: float) -> Request:
        num_prompt_tokens, beams = len(message.prompt_token_ids), message.sampling.beams
        max_kv_tokens = self._max_kv_tokens
        if beams is not None and not message.hand_over:
            max_kv_tokens = self._max_beam_tokens(num_prompt_tokens, beams.width)
        full_limit = min(num_prompt_tokens + message.sampling.max_tokens, self._max_model_len, max_kv_tokens + 1)
        request = Request(
            message, arrival_index=self._next_arrival_index, full_limit=full_limit, queued_at_s=queued_at_s
        )
        self._next_arrival_index += 1
        if message.trace is not None:
            request.timeline = Timeline(arrived_s=request.queued_at_s, clock=self._clock)
        return request

    def _check(self, message: GenerateRequest) -> None:
        num_prompt_tokens = len(message.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise RequestRefusedError("the prompt has no tokens", code="empty_prompt")
        if message.sampling.max_tokens < 1:
            raise RequestRefusedError(
                f"max_tokens must be at least 1, got {message.sampling.max_tokens}", code="invalid_max_tokens"
            )
        if num_prompt_tokens > self._max_model_len - 1:
            raise PromptTooLongError(
                num_prompt_tokens=num_prompt_tokens,
                max_prompt_tokens=self._max_model_len - 1,
                why=f"the model's context is {self._max_model_len} tokens, and at least one must be left to generate",
            )
        if num_prompt_tokens > self._max_kv_tokens:
            raise PromptTooLongError(
                num_prompt_tokens=num_prompt_tokens,
                max_prompt_tokens=self._max_kv_tokens,
                why=f"the whole KV cache has room for {self._max_kv_tokens} tokens",
            )
        if not self._has_connector and (message.hand_over or message.kv_transfer is not None):
            raise RequestRefusedError(
                "the request hands KV over or brings it along, but this engine has no KV connector", code="no_connector"
            )
        if message.sampling.grammar is not None:
            self._check_grammar(message.sampling)
        if message.sampling.beams is not None and not message.hand_over:
            self._check_beams(num_prompt_tokens, message.sampling.beams)
        num_waiting = self._live_requests.num_waiting
        # A request with output was accepted elsewhere: routers bound these, and a refusal would lose its KV.
        if num_waiting >= self._config.max_num_waiting and not message.output_token_ids:
            raise RequestRefusedError(
                f"{num_waiting} requests are waiting, which is the limit (max_num_waiting is "
                f"{self._config.max_num_waiting})",
                code="queue_full",
            )

    def _check_beams(self, num_prompt_tokens: int, beams: BeamParams) -> None:
        if beams.width > self._config.max_num_seqs:
            raise RequestRefusedError(
                f"{beams.width} beams are asked for, and a step computes at most {self._config.max_num_seqs} "
                "(decode.scheduler.max_num_seqs)",
                code=TOO_MANY_BEAMS,
            )
        if self._max_beam_tokens(num_prompt_tokens, beams.width) < num_prompt_tokens:
            raise RequestRefusedError(
                f"{beams.width} beams of a prompt of {num_prompt_tokens} tokens need more KV than the whole cache "
                "has room for: use fewer beams",
                code=TOO_MANY_BEAMS,
            )

    def _check_grammar(self, sampling: SamplingParams) -> None:
        if self._grammars is None:
            raise RequestRefusedError(
                "the request has a grammar, but this engine has no compiler for grammars", code=GRAMMAR_REFUSED
            )
        if not sampling.eos_token_ids:
            raise RequestRefusedError(
                "the request has a grammar, but no end-of-sequence token that could end its output",
                code=GRAMMAR_REFUSED,
            )

    def _end_if_complete(self, request: Request) -> None:
        """End a request whose last token was already emitted before it was moved here."""
        if not request.message.output_token_ids:
            return
        last_token = request.message.output_token_ids[-1]
        if last_token in request.stop_ids and request.num_tokens >= request.first_stop:
            self._early.drop(request.request_id)
            self._live_requests.finish(request)
            self._live_requests.report(request, FinishReason.STOP, stop_token_id=last_token)
        elif request.num_tokens >= request.full_limit:
            self._early.drop(request.request_id)
            self._live_requests.finish(request)
            self._live_requests.report(request, FinishReason.LENGTH)
