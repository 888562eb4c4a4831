"""Sections of baton.yaml: most are the settings of other packages, each with its description."""

from __future__ import annotations

from pydantic import Field

from cluster.config.config_section import Section, section_of
from engine.contract.config import CacheConfig, GPUConfig, SchedulerConfig, SpeculativeConfig
from engine.contract.promise import MAX_PROMISE_MS
from kv_transfer.fault_options import FaultOptions
from kv_transfer.options import ConnectorOptions
from kv_transfer.registry import TIERS
from router.policies import policy_names
from router.security import SecuritySettings
from router.settings import MetricsCompat, RouterSettings
from router.telemetry.settings import TracingSettings

CacheSection = section_of(
    "CacheSection",
    CacheConfig,
    descriptions={
        "block_size": "Tokens per KV block. Must be the same in both pools.",
        "gpu_memory_utilization": "Share of a GPU's memory, from 0 to 1, that weights and KV cache together may use.",
        "kv_cache_bytes": "Size of the KV cache in bytes, at least 1. Null sizes it automatically: on a GPU what "
        "`gpu_memory_utilization` leaves besides the weights; on a CPU 1 GiB, or room for one request of full length "
        "if that is more, but at most 40 % of the free memory.",
        "num_blocks": "Size of the KV cache in blocks, at least 1, as an alternative to `kv_cache_bytes`. Null: as "
        "many blocks as fit.",
        "enable_prefix_caching": "Keep the KV of finished requests and reuse it for prompts that begin with the same "
        "tokens.",
        "prefault": "On a CPU, allocate the memory of the whole KV cache at startup instead of at first use. Requests "
        "never wait for page faults, but startup takes up to one second longer per GiB.",
    },
)

SchedulerSection = section_of(
    "SchedulerSection",
    SchedulerConfig,
    omit={"max_model_len", "cuts_decode_steps"},
    descriptions={
        "max_num_batched_tokens": "Token budget of one step, over all requests. A higher value computes prompts "
        "faster but raises inter-token latency while it does.",
        "max_num_seqs": "Largest number of requests that run at the same time. A beam search counts once per beam.",
        "max_num_waiting": "Largest number of new requests that wait in a worker's queue. Requests that continue here "
        "from another worker are always accepted.",
        "enable_chunked_prefill": "Split prompts that do not fit into one step over several steps.",
        "long_prefill_token_threshold": "Most tokens of a single prompt that one step computes; longer prompts count "
        "as long. 0: no limit besides `max_num_batched_tokens`.",
        "policy": "Order of the waiting requests: `fcfs` is first come, first served; `priority` goes by the "
        "requests' priorities.",
        "load_failure_policy": "What happens to a request whose KV could not be fetched: `recompute` computes it "
        "again, `fail` ends the request with an error.",
        "recompute_damaged_only": "After a partly failed fetch, recompute only the missing blocks. False recomputes "
        "everything from the first missing block on, as does a worker without chunked prefill.",
        "watermark": "Share of the KV blocks, from 0 to 1, kept free when requests are admitted, so that running "
        "requests can grow. A higher value means fewer preemptions but fewer requests at once.",
        "ask_again_s": "Seconds between two questions to a connector that cannot tell yet whether it has a prompt's "
        "KV.",
        "max_num_partial_prefills": "Largest number of prompts that may be partly computed at the same time; they "
        "share the token budget evenly. 0: no limit.",
        "max_long_partial_prefills": "Largest number of long prompts (see `long_prefill_token_threshold`) among them. "
        "0: no limit.",
        "scheduler_delay_factor": "While other requests run, a new prompt waits this many times the duration of the "
        "last step with prompts, so that larger batches form. Higher values trade TTFT for throughput; 0 disables the "
        "delay.",
        "enable_priority_preemption": "With `policy: priority`, let a request that waits, or whose KV was just "
        "loaded, preempt running requests of lower priority.",
        "artificial_preemption_probability": "For tests: probability of a preemption that is not needed, 0 to 1.",
        "max_num_artificial_preemptions": "For tests: largest number of such preemptions.",
        "max_decode_steps": "Largest number of decode steps that a worker runs as one while all its requests decode "
        "and none waits. Higher values save messages and work between steps, but a new request waits until the last "
        "of these steps ends.",
        "async_scheduling": "Schedule and launch the next step before the result of the current one is there. `auto`: "
        "on GPUs, but not with draft tokens (`speculative`) or with `max_decode_steps` above 1.",
        "enable_cache_events": "Record which blocks the prefix cache stores and removes.",
        "cache_event_capacity": "Largest number of these records that is kept.",
    },
)

GPUSection = section_of(
    "GPUSection",
    GPUConfig,
    descriptions={
        "cuda_graphs": "Replay decode steps as CUDA graphs. `auto`: on decode workers whose GPU supports it; `true`: "
        "refuse to start without support; `false`: never. See docs/gpu.md.",
        "max_graph_batch_size": "Largest decode step that is captured as a graph, in tokens: one per request and one "
        "per draft token. Null takes `max_num_seqs`, and with draft tokens up to 128.",
        "compile_elementwise": "Use fused kernels for the operations between matrix products and attention. `auto`: "
        "on GPUs where they compile; `true`: refuse to start elsewhere; `false`: never. Use the same value for all "
        "workers, since outputs may differ in the last bit.",
    },
)

SpeculativeSection = section_of(
    "SpeculativeSection",
    SpeculativeConfig,
    descriptions={
        "method": "What proposes draft tokens, which a step then verifies: the same answers in fewer steps. `ngram` "
        "searches the request itself for its last tokens, `suffix` also searches earlier answers with the same cache "
        "salt, `draft_model` runs a smaller model.",
        "num_tokens": "Most draft tokens per request and step. `auto`: as many as measurements show to pay off, "
        "possibly none.",
        "min_match": "Fewest of the last tokens that must match earlier text before `ngram` and `suffix` propose what "
        "followed there. A higher value gives fewer but safer drafts.",
        "max_match": "Most of the last tokens that are compared with earlier text.",
        "max_kept_tokens": "Tokens of earlier answers that `suffix` keeps on each worker, at most.",
        "draft_model": "Directory of the smaller model, which must have the same vocabulary. Every decode worker "
        "loads it.",
        "draft_cache_tokens": "Size of the draft model's KV cache on each worker, in tokens of running requests. "
        "Requests that do not fit get no drafts for a while.",
    },
)

FaultsSection = section_of(
    "FaultsSection",
    FaultOptions,
    descriptions={
        "seed": "Seed of the random faults: the same seed gives the same faults.",
        "read_fails": "Probability that a read fails.",
        "read_hangs": "Probability that a read never finishes.",
        "read_late": "Probability that a read is delayed by `late_s`.",
        "bit_flips": "Probability that a read delivers one wrong bit.",
        "handshake_refused": "Probability that a handshake is refused.",
        "notification_lost": "Probability that a message is lost.",
        "notification_late": "Probability that a message is delayed by `late_s`.",
        "notification_twice": "Probability that a message is delivered twice.",
        "lease_expired": "Probability that the lease on the blocks has expired by the time its reader is done.",
        "peer_replaced": "Probability that a read finds that its peer was restarted.",
        "late_s": "Delay in seconds for `read_late` and `notification_late`.",
        "schedule": "Faults injected at fixed occasions, whatever their probability: a list of `{fault, nth}`, where "
        "`nth` counts the occasions from 1.",
    },
)

_TIER_NAMES = ", ".join(f"`{tier.name}` ({tier.place})" for tier in TIERS.values())

TransferSection = section_of(
    "TransferSection",
    ConnectorOptions,
    optional_sections={"faults": FaultsSection},
    descriptions={
        "connector": "Where workers get KV blocks from: `nixl` transfers them between workers; `chain` asks several "
        "sources in turn.",
        "chain": "With `connector: chain`, the sources in the order in which they are asked: `nixl`, and tiers that "
        f"keep what the prefix cache evicts: {_TIER_NAMES}. With `[host, nixl]`, what main memory does not have is "
        "read from peers.",
        "lease_ttl_s": "Lease on a prompt's KV blocks: seconds for which a prefill worker holds them for a decode "
        "worker that does not report.",
        "handshake_timeout_s": "Time limit in seconds for the handshake of two workers. The first request whose KV "
        "lies on a new peer waits for it.",
        "load_timeout_s": "Time limit in seconds for fetching a prompt's KV.",
        "answer_timeout_s": "Seconds for which a known worker may be silent while KV is fetched from it, plus 1 s per "
        "16 MiB being read. After that other workers go on without it.",
        "hung_read_timeout_s": "Seconds for which a read may still hold its blocks after `load_timeout_s` has passed. "
        "Then the worker moves its requests to others, exits and is replaced. By default both times together are "
        "longer than Serve takes to replace a stalled source, or TCP to notice a dead host; both end the read.",
        "transport": "How KV moves. `local`: through memory that the kernel restricts to this user, on one machine, "
        "without a port; `network`: over TCP or RDMA, on ports without authentication (docs/security.md); `auto`: "
        "`local` with a private Ray, `network` with any other.",
        "streamed": "Fetch a prompt's KV while it is still being computed, so that only the last part is left at the "
        "end. `true`: after every chunk; `auto`: the same, but at most every 50 ms where the KV cache lies in host "
        "memory; `false`: once the prompt is computed.",
        "checksums": "Verify every fetched block against the prefill worker's copy. Null: only where the KV cache "
        "lies in host memory, where it costs less than 2 % of TTFT (benchmarks/kv_transfer.py).",
        "faults": "Faults to inject on purpose, for tests.",
        "allow_faults": "Must be true for `faults` to be accepted.",
    },
)

RouterSection = section_of(
    "RouterSection",
    RouterSettings,
    omit={"metrics_compat", "promise", "roles", "allows_faults", "scaling"},
    descriptions={
        "max_body_bytes": "Largest request body in bytes.",
        "max_body_values": "Largest number of JSON values in a request body; an object counts as 25. Bounds the time "
        "spent validating.",
        "max_reading_bytes": "Bytes of request bodies over 64 KiB that may be read, parsed or tokenized at the same "
        "time. As many more may wait; beyond that the answer is 503.",
        "reading_wait_s": "Seconds that such a body may wait for its turn, and that a grammar may wait to be checked. "
        "0: not at all.",
        "read_timeout_s": "Time limit in seconds for a request body to arrive.",
        "max_num_requests": "Largest number of sequences in progress; beyond it the answer is 429. Once requests with "
        "several API keys have come, one key gets at most three quarters of what the others leave.",
        "max_num_queued": "Largest number of sequences that wait for KV blocks on a decode worker; beyond it the "
        "answer is 429. All choices of a request are counted when it arrives, and API keys share this limit as they "
        "do `max_num_requests`.",
        "max_num_choices": "Largest `n` or `best_of` of a request, multiplied by its number of prompts. It is never "
        "more than `max_num_requests`.",
        "max_num_stop_strings": "Largest number of stop strings in a request.",
        "max_logprobs": "Largest number of top alternatives that a request may ask for per token.",
        "default_timeout_s": "Deadline in seconds of a request that does not set one.",
        "max_timeout_s": "Longest deadline in seconds that a request may set.",
        "admin_api": "Serve `/admin`, which takes orders to workers from holders of an admin key.",
        "tool_format": "Syntax of the model's tool calls. `auto`: derived from its chat template; `none`: no tools; "
        "otherwise one of the names in docs/tools.md.",
        "reasoning_format": "How the model marks its reasoning. `auto`: derived from its chat template and tokens; "
        "`none`: reasoning stays in the content; otherwise one of the names in docs/tools.md.",
        "default_max_tokens": "Most tokens of an answer if the request sets no limit. Null: up to the end of the "
        "context.",
        "prefill_timeout_s": "Time limit in seconds for a prefill worker to compute one prompt.",
        "submit_timeout_s": "Time limit in seconds for a decode worker to accept requests.",
        "connect_timeout_s": "Time limit in seconds for opening the stream of a decode worker.",
        "stream_silence_timeout_s": "Seconds of silence on a decode worker's stream after which the worker counts as "
        "lost.",
        "unresponsive_after_s": "Seconds without a report or an answer after which a worker counts as lost. Lower "
        "values fail over sooner, but more often without need.",
        "local_prefill_tokens": "Prompts with at most this many uncached tokens are computed on the decode worker "
        "instead of a prefill worker. 0 sends every prompt to prefill workers.",
        "max_prefill_queue_lead": "The decode worker computes a prompt itself while every prefill worker has more "
        "than this many more prompt tokens waiting than it has. 0: never.",
        "session_header": "Request header that names a session; requests of a session go to the same workers. Null "
        "ignores sessions.",
        "session_max_usage_lead": "Largest lead in KV usage, from 0 to 1, of a session's worker over the emptiest "
        "worker. Beyond it, another worker is chosen. Higher values favour prefix cache hits over even load.",
        "session_max_queue_lead": "The same for queues: the largest lead in waiting prompt tokens over the worker "
        "with the fewest.",
        "rebalance": "Move running requests, with their KV, away from decode workers that are nearly full or "
        "predicted to exceed the promised inter-token latency, to workers with room.",
        "rebalance_max_kv_usage": "KV usage, from 0.2 to 1, from which on requests are moved away from a worker. "
        "Workers that take them stay 0.15 below it.",
        "rebalance_max_in_flight": "Largest number of moves in progress per router; half as many from or to a single "
        "worker.",
        "rebalance_max_moves": "Most times that one request may be moved for balance.",
        "rebalance_min_stay_s": "Seconds for which a request stays on a worker before it may be moved.",
        "rebalance_min_stay_tokens": "Tokens that a request gets from a worker before it may be moved.",
        "rebalance_cooldown_s": "Seconds after a move during which neither of its two workers takes part in another "
        "one.",
        "move_waiting_prompts": "With elastic roles, move prompts that wait at one worker to another that would "
        "finish them clearly sooner.",
        "hold_first_tokens": "Hold the first token back until the second is there, to avoid a long gap between them "
        "while the KV moves to another worker. Only where both TTFT and inter-token latency were promised, and for at "
        "most 0.9 of `ttft_ms`.",
        "adapt_leanings": "With elastic roles, change the preferred role of workers as the load changes, "
        "and divide the work while bursts of prompts come. An operator's `baton lean` holds for 5 minutes.",
        "max_mirrored_blocks": "Largest number of prefix cache blocks that a router tracks, at about 200 bytes each.",
        "max_stored_responses": "Largest number of /v1/responses that each router stores. When full, the oldest "
        "response of the API key with the most is dropped. 0 stores none.",
        "max_stored_response_bytes": "Most bytes that stored responses may take together. When full, the oldest "
        "responses of the API key that takes the most are dropped.",
        "stored_response_ttl_s": "Seconds for which a response is stored.",
        "trace_requests": "Largest number of traces of finished and refused requests that each router keeps "
        "(docs/tracing.md). 0 keeps none.",
        "trace_sample_rate": "Share of all requests that is traced, from 0 to 1.",
        "max_prefill_attempts": "Most prefill workers that are tried for one request.",
        "write_timeout_s": "Seconds that a client may leave an event unread before its request is aborted.",
        "min_read_bytes_per_s": "Least bytes a second, on average over five times `write_timeout_s`, that a client "
        "that is behind must read, or its connection is closed. 0: any pace will do.",
        "max_write_delay_s": "With many streams, the longest time in seconds that tokens wait to be written together. "
        "Higher values save router CPU at the cost of latency; 0 writes at once.",
        "migration_limit": "Most times that a request may move to another decode worker.",
        "prefill_lost_policy": "What happens when a prefill worker is lost before it answers. `retry`: another one "
        "computes the prompt, or the decode worker if none is left; `recompute`: the decode worker computes it at "
        "once; `fail`: an error.",
        "kv_lost_policy": "What happens when a prompt's KV is lost before it is fetched. `retry`: prefill again; "
        "`recompute`: compute it on the decode worker; `cheapest`: whichever of the two is estimated to be faster; "
        "`fail`: an error.",
        "decode_lost_policy": "What happens when a decode worker is lost. `retry`: another one continues after the "
        "tokens already sent; `fail`: an error.",
        "recovery_wait_s": "Seconds that an accepted request waits for a worker to come back after a failure. Should "
        "exceed the start time of a worker.",
        "growth_headroom_tokens": "Free KV, in tokens beyond its prompt, that a request must find on a decode worker "
        "to be placed there.",
        "report_period_s": "Seconds between the load reports of an idle worker. A worker that has not reported for "
        "twice as long gets requests only while no other can take them.",
        "status_timeout_s": "Time limit in seconds for a worker to report its status.",
        "peer_period_s": "Seconds between two exchanges of counters among routers.",
        "abort_timeout_s": "Time limit in seconds for a worker to confirm an abort.",
        "backoff_min_s": "Seconds until a failed worker is first tried again; the wait doubles with each failure.",
        "backoff_max_s": "Longest such wait in seconds.",
        "retry_after_s": "Seconds in the `Retry-After` header of refused requests.",
        "prefill_policy": f"How a prefill worker is chosen: {', '.join(policy_names())} ([routing.md](routing.md)).",
        "decode_policy": "How a decode worker is chosen; same values as `prefill_policy`.",
    },
)

SecuritySection = section_of(
    "SecuritySection",
    SecuritySettings,
    omit={"own_admin_key", "is_loopback"},
    descriptions={
        "api_keys": "Hashes of the API keys, made by `baton keys new`. Empty: the API is open to everyone.",
        "admin_keys": "Hashes of the admin keys, which also open `/status`, `/metrics`, `/admin` (drains and faults), "
        "`/reset_prefix_cache` and `/server_info`. Empty: `baton serve` creates a key that commands of the same user "
        "find.",
        "api_key_file": "File with more hashes of API keys, one per line; read on the machine that runs `baton serve`.",
        "admin_key_file": "File with more hashes of admin keys, one per line.",
        "open_metrics": "Let anyone read `/metrics` without a key.",
        "max_num_headers": "Largest number of headers in a request.",
        "max_header_bytes": "Largest size of a request's URL and headers, in bytes.",
        "header_timeout_s": "Time limit in seconds for a request's headers, counted from the request's first byte, or "
        "from the start of a new connection.",
        "max_connections": "Largest number of connections per router, at most three quarters of the files that its "
        "process may open. Beyond it, each new connection closes the one that has waited longest for a request.",
        "cors_allow_origins": "Origins of web pages that may call the API from a browser. `*` allows all.",
        "allowed_hosts": "Host names, besides loopback, under which an API without keys may be called, such as that "
        "of a reverse proxy. `*` allows all.",
    },
)


class SLOSection(Section):
    """The latency promised to requests that do not ask for one themselves."""

    ttft_ms: float | None = Field(
        default=None,
        gt=0,
        le=MAX_PROMISE_MS,
        description="Promised time to first token (TTFT) in milliseconds. Null promises nothing.",
    )
    itl_ms: float | None = Field(
        default=None,
        gt=0,
        le=MAX_PROMISE_MS,
        description="Promised inter-token latency in milliseconds. While requests generate, a step takes only as many "
        "prompt tokens as keep it below this, even if `max_num_batched_tokens` allows more. Null promises nothing.",
    )


class HealthSection(Section):
    """When a worker counts as hanging. Serve replaces a worker after three checks in a row that failed."""

    step_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Time limit in seconds for one step. A worker that has work but finishes no step for this long is "
        "taken out and replaced. The time its threads wait for a core does not count. Raise it if the largest steps of "
        "your model take seconds.",
    )
    drain_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that a draining worker or router has for its requests to finish or move. Then the rest "
        "is cut off; requests of a worker continue on another one.",
    )
    check_period_s: float = Field(
        default=1.0,
        gt=0,
        description="Seconds between Serve's health checks of a replica. Serve replaces a worker after three failed "
        "checks in a row.",
    )
    check_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds after which an unanswered health check counts as failed."
    )


class MetricsSection(Section):
    """What `/metrics` offers."""

    compat: MetricsCompat = Field(
        default="none",
        description="Also export metrics under the names of another system, so that its dashboards work. `none`: "
        "Baton's names only.",
    )


TracingSection = section_of(
    "TracingSection",
    TracingSettings,
    descriptions={
        "otlp_endpoint": "URL of an OpenTelemetry collector that accepts OTLP over HTTP, such as "
        "`http://localhost:4318`; `/v1/traces` is appended if it has no path. Null exports no spans. Needs the extra "
        "`otel` on every machine.",
        "sample_ratio": "Share of the traces started here for which spans are exported, 0 to 1. A request with a "
        "`traceparent` follows that header's sampling flag. Null uses `OTEL_TRACES_SAMPLER`, or samples everything if "
        "that is not set.",
        "service_name": "The resource attribute `service.name`. Null takes `OTEL_SERVICE_NAME`, or `baton`.",
    },
)
