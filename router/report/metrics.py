"""One router's metrics: requests, tokens, and how long each part of a request takes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from engine.contract.promise import Promise
from router.report.counters import ROUTER_COUNTERS, RouterCounters
from router.report.metric_rows import Distribution, Labels, MetricFamily, counter, gauge, histogram
from router.report.milestones import Milestones

_LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)

FINISH_REASONS = ("stop", "length", "error", "abort")

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from acceptance to the first token.", _LONG_S),
    "inter_token_latency_seconds": ("Time between tokens of a sequence.", _SHORT_S),
    "e2e_request_latency_seconds": ("Time from acceptance to the end.", _LONG_S),
    "request_queue_time_seconds": (
        "Time waiting for room on a decode worker, and in the prefill engine's queue.",
        _LONG_S,
    ),
    "request_prefill_time_seconds": ("Time from admission to the first token, without the time queued.", _LONG_S),
    "request_handover_time_seconds": (
        "Time from a prefill worker's token to the decode worker's first: moving the KV, and one step.",
        _LONG_S,
    ),
    "request_decode_time_seconds": ("Time from the first token to the last, including the hand-over.", _LONG_S),
    "request_inference_time_seconds": ("Time for prefill and decode together.", _LONG_S),
    "request_time_per_output_token_seconds": (
        "Decode time of a request divided by its tokens after the first.",
        _SHORT_S,
    ),
    "request_prompt_tokens": ("Prompt tokens of finished requests.", _TOKENS),
    "request_generation_tokens": ("Generated tokens of finished requests.", _TOKENS),
    "request_params_max_tokens": ("Limits on the generated tokens of finished requests.", _TOKENS),
}


class RouterMetrics:
    """This router's measurements since its start."""

    def __init__(self, counters: RouterCounters | None = None) -> None:
        self._counters = counters or RouterCounters()
        self._started_s = time.time()
        self._answers: Counter[tuple[str, str, str]] = Counter()
        self._finishes: dict[str, int] = dict.fromkeys(FINISH_REASONS, 0)
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._gauges: list[tuple[str, str, Callable[[], float]]] = []
        self._distributions = {name: Distribution(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._itl = self._distributions["inter_token_latency_seconds"]

    def watch(self, *, in_progress: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read these gauges whenever Prometheus asks."""
        self._gauges = [
            ("baton:router_requests_in_progress", "Sequences in progress.", in_progress),
            ("baton:router_requests_waiting", "Sequences that wait for room on a decode worker.", waiting),
        ]

    def first_tokens(self, seconds: float, *, num_prompt_tokens: int, num_tokens: int) -> None:
        """Note a sequence's first token, and any that came with it."""
        self._distributions["time_to_first_token_seconds"].observe(seconds)
        self._num_prompt_tokens += num_prompt_tokens
        self._num_generation_tokens += num_tokens

    def more_tokens(self, seconds: float, *, num_tokens: int) -> None:
        """Note ``num_tokens`` more tokens, ``seconds`` after the ones before."""
        self._itl.observe(seconds / num_tokens, num_tokens)
        self._num_generation_tokens += num_tokens

    def first_token_of(self, promise: Promise, seconds: float | None) -> None:
        """Compare a sequence's time to first token with its promise; None: it failed before."""
        if promise.ttft_ms is not None:
            self._counters.num_ttft_promises += 1
            self._counters.num_ttft_kept += seconds is not None and seconds * 1e3 <= promise.ttft_ms

    def gaps_of(self, promise: Promise, seconds: float) -> None:
        """Compare the mean gap between tokens of a sequence that ended well with its promise."""
        if promise.itl_ms is not None:
            self._counters.num_itl_promises += 1
            self._counters.num_itl_kept += seconds * 1e3 <= promise.itl_ms

    def ended(self, reason: str) -> None:
        """Count an end of a sequence: ``stop``, ``length``, ``error``, or ``abort`` if its client left."""
        self._finishes[reason] += 1

    def finished(self, times: Milestones, *, num_prompt_tokens: int, num_output_tokens: int, max_tokens: int) -> None:
        """Note how long each part of a sequence that ended well took."""
        now_s = time.perf_counter()
        observe = {
            "e2e_request_latency_seconds": now_s - times.accepted_s,
            "request_queue_time_seconds": times.queue_s,
            "request_prefill_time_seconds": times.prefill_s,
            "request_prompt_tokens": num_prompt_tokens,
            "request_generation_tokens": num_output_tokens,
            "request_params_max_tokens": max_tokens,
        }
        decode_s = now_s - times.first_token_s
        observe["request_inference_time_seconds"] = times.prefill_s + decode_s
        if num_output_tokens > 1:
            observe["request_decode_time_seconds"] = decode_s
            observe["request_time_per_output_token_seconds"] = decode_s / (num_output_tokens - 1)
        if (handover_s := times.handover_s) is not None:
            observe["request_handover_time_seconds"] = handover_s
        for name, value in observe.items():
            self._distributions[name].observe(value)

    def answered(self, path: str, method: str, code: int) -> None:
        """Count an answered HTTP request."""
        self._answers[path, method, str(code)] += 1

    def _counted(self) -> list[MetricFamily]:
        """The counters; those of the same name form one family."""
        texts: dict[str, str] = {}
        values: dict[str, dict[Labels, float]] = {}
        for name, told in ROUTER_COUNTERS.items():
            if told.metric:
                texts.setdefault(told.metric, told.text)
                values.setdefault(told.metric, {})[told.labels] = getattr(self._counters, name)
        return [counter(f"baton:{metric}", texts[metric], rows) for metric, rows in values.items()]

    def families(self) -> tuple[MetricFamily, ...]:
        """All metrics, without the label that names the router."""
        answers: dict[Labels, float] = {
            (("path", path), ("method", method), ("code", code)): number
            for (path, method, code), number in self._answers.items()
        }
        finishes: dict[Labels, float] = {(("reason", reason),): number for reason, number in self._finishes.items()}
        return (
            counter("baton:http_requests", "HTTP requests by path, method and status code.", answers),
            counter("baton:request_finishes", "Sequences by the reason why they ended.", finishes),
            counter("baton:prompt_tokens", "Prompt tokens of answered requests.", {(): self._num_prompt_tokens}),
            counter("baton:generation_tokens", "Tokens generated.", {(): self._num_generation_tokens}),
            *self._counted(),
            *(histogram(f"baton:{name}", text, self._distributions[name]) for name, (text, _) in _HISTOGRAMS.items()),
            gauge("baton:router_start_time_seconds", "Unix time of this router's start.", {(): self._started_s}),
            *(gauge(name, text, {(): read()}) for name, text, read in self._gauges),
        )
