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
        "block_size": "Tokens in a KV block.",
        "gpu_memory_utilization": "Share of a GPU's memory that weights and KV cache may take together.",
        "kv_cache_bytes": "Bytes of the KV cache, at least 1; null: that share of a GPU; on a CPU 1 GiB, or one "
        "request of full length if that is more, but no more than 40 % of the memory that is free.",
        "num_blocks": "Blocks of the KV cache, at least 1, instead of bytes; null takes as many as fit.",
        "enable_prefix_caching": "Keep the KV of finished requests for prompts that begin alike.",
        "prefault": "On a CPU, take the memory of the whole KV cache from the system at the start: no request waits "
        "for it later, and the start takes up to a second per GiB longer.",
    },
)

SchedulerSection = section_of(
    "SchedulerSection",
    SchedulerConfig,
    omit={"max_model_len", "cuts_decode_steps"},
    descriptions={
        "max_num_batched_tokens": "Tokens computed in one step at most, over all requests.",
        "max_num_seqs": "Requests that run at the same time at most; a beam search counts as many as it has beams.",
        "max_num_waiting": "New requests that wait in an engine at most; ones that go on there always come in.",
        "enable_chunked_prefill": "Split prompts that do not fit into a step.",
        "long_prefill_token_threshold": "Tokens of one prompt in a step at most; 0 means no such limit.",
        "policy": "Order of waiting requests: first come first served, or by priority.",
        "load_failure_policy": "When KV could not be fetched: compute it again, or fail the request.",
        "recompute_damaged_only": "Compute again only the blocks that were not fetched, not all from the first on; "
        "without chunked prefill it has no effect.",
        "watermark": "Share of the KV blocks that stays free when requests are admitted.",
        "ask_again_s": "Pause before a connector that does not know yet is asked again.",
        "max_num_partial_prefills": "Prompts that may be computed in part at the same time; 0 means no such limit.",
        "max_long_partial_prefills": "Long prompts among them; 0 means no such limit.",
        "scheduler_delay_factor": "Hold new prompts back for so many times the latency of the last; 0 means never.",
        "enable_priority_preemption": "Let waiting or loaded requests take the place of ones of lower priority.",
        "artificial_preemption_probability": "Preempt without need, for tests.",
        "max_num_artificial_preemptions": "How often at most.",
        "max_decode_steps": "Decode steps that a worker makes in one at most, while all its requests decode and nobody "
        "waits: fewer and larger messages, less work between steps, and who arrives waits for the last of them.",
        "async_scheduling": "Schedule and launch a step before the result of the one before is there; `auto`: on GPUs.",
        "enable_cache_events": "Record what the prefix cache stores and removes.",
        "cache_event_capacity": "Records kept at most.",
    },
)

GPUSection = section_of(
    "GPUSection",
    GPUConfig,
    descriptions={
        "cuda_graphs": "Replay decode steps as CUDA graphs: `auto` on decode workers whose GPU can, `true` or fail to "
        "start, `false` never. See docs/gpu.md.",
        "max_graph_batch_size": "Tokens of the largest decode step that is a graph, one for each request and for each "
        "of its drafts; null takes `max_num_seqs`, and with drafts up to 128.",
        "compile_elementwise": "Fused kernels for what lies between matrix products and attention, likewise.",
    },
)

SpeculativeSection = section_of(
    "SpeculativeSection",
    SpeculativeConfig,
    descriptions={
        "method": "Who proposes draft tokens, which a step verifies: the same answers in fewer steps. `ngram` looks "
        "where the last tokens stood in the request itself, `suffix` also in earlier answers with the same cache salt, "
        "`draft_model` asks a smaller model.",
        "num_tokens": "Drafts of a request in a step at most; `auto`: as many as are measured to pay, if any.",
        "min_match": "So many of the last tokens must be found again.",
        "max_match": "So many are looked for at most.",
        "max_kept_tokens": "Tokens of earlier answers that `suffix` keeps on each worker.",
        "draft_model": "Directory of the smaller model, of the same vocabulary. Each decode worker loads it.",
        "draft_cache_tokens": "Tokens of running requests whose KV the draft model keeps on each worker, at most; "
        "requests beyond them have no drafts for a while.",
    },
)

FaultsSection = section_of(
    "FaultsSection",
    FaultOptions,
    descriptions={
        "seed": "Same seed, same faults.",
        "read_fails": "Probability that a read fails.",
        "read_hangs": "Probability that a read never ends.",
        "read_late": "Probability that a read begins and ends `late_s` later.",
        "bit_flips": "Probability that one bit of what a read brought is wrong.",
        "handshake_refused": "Probability that a handshake is refused.",
        "notification_lost": "Probability that a message does not arrive.",
        "notification_late": "Probability that a message is sent `late_s` later.",
        "notification_twice": "Probability that a message arrives twice.",
        "lease_expired": "Probability that a lease has expired when its reader is done.",
        "peer_replaced": "Probability that a read finds another life of its peer.",
        "late_s": "How late is late.",
        "schedule": "Occasions to take by number: a list of `{fault, nth}`.",
    },
)

_TIER_NAMES = ", ".join(f"`{tier.name}` ({tier.place})" for tier in TIERS.values())

TransferSection = section_of(
    "TransferSection",
    ConnectorOptions,
    optional_sections={"faults": FaultsSection},
    descriptions={
        "connector": "What supplies KV blocks: `nixl` moves them between workers; `chain` asks several sources.",
        "chain": "Sources of the connector `chain`, in the order in which they are asked: `nixl`, and tiers that keep "
        f"what the prefix cache evicts: {_TIER_NAMES}. `[host, nixl]` reads from peers what is not in main memory.",
        "lease_ttl_s": "How long a prefill worker keeps blocks for a decode worker that does not report.",
        "handshake_timeout_s": "How long two workers may take to meet; a request whose KV lies at one that was not met "
        "before waits for that.",
        "load_timeout_s": "How long fetching a prompt's KV may take.",
        "answer_timeout_s": "How long a worker from which KV is fetched, and that was met before, may be silent before "
        "others go on without it; 1 s more for each 16 MiB that are being read from it.",
        "hung_read_timeout_s": "How long a read whose load ran out of time may hold its blocks; past it the worker "
        "moves its requests to others, ends and is replaced. With `load_timeout_s` before it, it is longer than Serve "
        "takes to replace a source that stands still, or TCP to find its host gone: both end the read.",
        "transport": "What KV moves over: `local`: memory that the kernel keeps to this user, on one machine, without "
        "a port; `network`: TCP or RDMA, whose ports ask nobody who they are (docs/security.md); `auto`: `local` with "
        "a private Ray, `network` on any other.",
        "streamed": "Fetch a prompt's KV while it is computed, so that only its last part is left to fetch: `true` "
        "after every chunk, `auto` in steps of 50 ms at least where the KV cache lies in host memory.",
        "checksums": "Compare every block that was fetched with what its prefill worker had; null: where the KV cache "
        "lies in host memory, where it costs less than 2 % of the time to first token (benchmarks/kv_transfer.py).",
        "faults": "Faults to suffer on purpose, for tests.",
        "allow_faults": "Confirms that `faults` are meant.",
    },
)

RouterSection = section_of(
    "RouterSection",
    RouterSettings,
    omit={"metrics_compat", "promise", "roles", "allows_faults", "scaling"},
    descriptions={
        "max_body_bytes": "Largest request body.",
        "max_body_values": "JSON values of a request body at most; an object counts as 25 of them.",
        "max_reading_bytes": "Bytes of request bodies over 64 KiB that are read, parsed or tokenized at the same "
        "time; past it as many more wait, then the answer is 503.",
        "reading_wait_s": "How long such a body waits for others, and a grammar for those being read; 0: not at all.",
        "read_timeout_s": "How long a request body may take to arrive.",
        "max_num_requests": "Sequences in progress at most; past it the answer is 429. Once requests of several API "
        "keys came, one key has at most three quarters of what the others leave.",
        "max_num_queued": "Sequences that wait for room on a decode worker at most, all choices of a body counted "
        "when it comes; past it the answer is 429. Keys share it as they do `max_num_requests`.",
        "max_num_choices": "Largest `n` or `best_of` of a request, times its prompts.",
        "max_num_stop_strings": "Stop strings of a request at most.",
        "max_logprobs": "Most likely tokens that a request may ask for beside each token.",
        "default_timeout_s": "Deadline of a request that names none.",
        "max_timeout_s": "Longest deadline that a request may name.",
        "admin_api": "Take orders to workers at `/admin`, from who has an admin key.",
        "tool_format": "How the model writes calls of tools: `auto` goes by its chat template, `none` takes no tools, "
        "else one of the names in docs/tools.md.",
        "reasoning_format": "How the model marks its thinking: `auto` goes by its chat template and its tokens, `none` "
        "leaves all in the content, else one of the names in docs/tools.md.",
        "default_max_tokens": "Length of an answer whose request names none; null fills the context.",
        "prefill_timeout_s": "How long a prefill worker may take for one prompt.",
        "submit_timeout_s": "How long a decode worker may take to accept requests.",
        "connect_timeout_s": "How long opening the stream of a decode worker may take.",
        "stream_silence_timeout_s": "How long a decode worker's stream may be silent before it counts as lost.",
        "unresponsive_after_s": "How long a worker may neither report nor answer before it counts as lost.",
        "local_prefill_tokens": "A prompt of which the decode worker lacks at most so many tokens is computed there, "
        "not on a prefill worker; 0 sends all to prefill workers.",
        "max_prefill_queue_lead": "The decode worker computes prompts while so many more prompt tokens wait at every "
        "prefill worker than there; 0: never.",
        "session_header": "Header whose value names a session: its requests go to the same workers; null ignores it.",
        "session_max_usage_lead": "A session's worker may be so much fuller than the emptiest, in KV usage.",
        "session_max_queue_lead": "It may have so many more prompt tokens waiting than the worker with the fewest.",
        "rebalance": "Move live requests, with their KV, from decode workers that are predicted to break their "
        "promise or are nearly full to others with room.",
        "rebalance_max_kv_usage": "A worker with so much of its KV in use is too full; others take requests up to 0.15 "
        "less.",
        "rebalance_max_in_flight": "Moves under way at most, per router; half as many from or to one worker.",
        "rebalance_max_moves": "How often one request may be moved so.",
        "rebalance_min_stay_s": "How long a request stays at a worker before that.",
        "rebalance_min_stay_tokens": "How many tokens a request gets from a worker before that.",
        "rebalance_cooldown_s": "How long a worker neither gives nor takes requests after it did.",
        "move_waiting_prompts": "Where roles are elastic, let prompts that wait at one worker go to another that would "
        "compute them clearly sooner.",
        "hold_first_tokens": "Let a first token wait for the next one while its KV moves, for 0.9 of ttft_ms at most, "
        "where itl_ms was promised, too.",
        "adapt_leanings": "Where roles are elastic, change what workers lean to as the load changes; operators' orders "
        "stand for 5 minutes.",
        "max_mirrored_blocks": "Blocks of prefix caches that a router remembers at most, about 200 bytes each.",
        "max_stored_responses": "Responses of /v1/responses that each router keeps, the newest of the key that has "
        "most; 0 keeps none.",
        "max_stored_response_bytes": "What they may take together; the oldest ones go first of "
        "the key whose responses take most.",
        "stored_response_ttl_s": "How long a response is kept.",
        "trace_requests": "Traces of ended and of refused requests that each router keeps (docs/tracing.md); 0: none.",
        "trace_sample_rate": "The share of all requests that is traced, 0 to 1.",
        "max_prefill_attempts": "Prefill workers tried for one request at most.",
        "write_timeout_s": "How long a client may leave an event unread before its request is given up.",
        "max_write_delay_s": "With many streams, how long tokens may wait to be written together; 0: never.",
        "migration_limit": "How often a request may move to another decode worker.",
        "prefill_lost_policy": "When a prefill worker is lost before it answered: another one (the decode worker where "
        "none is left), the decode worker at once, or an error.",
        "kv_lost_policy": "When a prompt's KV was lost before it was read: what is estimated to cost less waiting, "
        "prefill again, compute on the decode worker, or an error.",
        "decode_lost_policy": "When a decode worker is lost: another one goes on from the tokens sent, or an error.",
        "recovery_wait_s": "How long an accepted request waits for a worker to come back.",
        "growth_headroom_tokens": "Room beyond its prompt that a request must find on a decode worker.",
        "report_period_s": "How often idle workers report their load; twice that if nothing changed, and a worker gets "
        "requests only while no other one can take them.",
        "status_timeout_s": "How long a worker may take to report its status.",
        "peer_period_s": "How often routers ask each other for what they counted.",
        "abort_timeout_s": "How long a worker may take to confirm an abort.",
        "backoff_min_s": "First wait before a failed worker is tried again.",
        "backoff_max_s": "Longest such wait.",
        "retry_after_s": "What `Retry-After` tells a client that was turned away.",
        "prefill_policy": f"How a prefill worker is chosen: {', '.join(policy_names())}.",
        "decode_policy": "How a decode worker is chosen, likewise.",
    },
)

SecuritySection = section_of(
    "SecuritySection",
    SecuritySettings,
    omit={"own_admin_key", "is_loopback"},
    descriptions={
        "api_keys": "Hashes of the keys that open the API, from `baton keys new`; without any it is open to all.",
        "admin_keys": "Hashes of the keys that also open `/status`, `/metrics`, `/admin` (drains and faults), "
        "`/reset_prefix_cache` and `/server_info`; without any, `baton serve` makes one of its own, which its user's "
        "commands find.",
        "api_key_file": "File with more hashes of API keys, one a line; read where `baton serve` runs.",
        "admin_key_file": "File with more hashes of admin keys.",
        "open_metrics": "Let everybody read `/metrics`.",
        "max_num_headers": "Headers of a request at most.",
        "max_header_bytes": "Bytes of a request's URL and headers at most.",
        "header_timeout_s": "How long a request's headers may take to arrive, from its first byte or from the "
        "connection's beginning.",
        "max_connections": "Connections of a router at most, and no more than three quarters of the files that its "
        "process may open; past it the one that waits longest for a request goes for each that comes.",
        "cors_allow_origins": "Origins of web pages that may call the API from a browser; `*` means all.",
        "allowed_hosts": "Names beside those of the loopback address by which an API without keys may be called, such "
        "as that of a reverse proxy in front; `*` means all.",
    },
)


class SLOSection(Section):
    """What requests are promised that ask for nothing else; null promises nothing."""

    ttft_ms: float | None = Field(default=None, gt=0, le=MAX_PROMISE_MS, description="Milliseconds to the first token.")
    itl_ms: float | None = Field(
        default=None,
        gt=0,
        le=MAX_PROMISE_MS,
        description="Milliseconds between tokens: a step takes as many prompt tokens as keep it under that while "
        "requests generate, whatever `max_num_batched_tokens` allows.",
    )


class HealthSection(Section):
    """When a worker counts as hanging. Serve replaces a worker after three checks in a row that failed."""

    step_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="How long one step may take. A worker that has work and ends no step for so long is left out and "
        "replaced; raise it for models whose largest step takes seconds on your machine.",
    )
    drain_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="How long a worker or router that is to go may take until its requests have finished or moved; "
        "what is left then is cut off, and requests of workers are continued elsewhere.",
    )
    check_period_s: float = Field(default=1.0, gt=0, description="How often Serve asks every replica for its health.")
    check_timeout_s: float = Field(default=10.0, gt=0, description="How long the answer may take.")


class MetricsSection(Section):
    """What `/metrics` offers."""

    compat: MetricsCompat = Field(
        default="none", description="Add the names of another system, for dashboards made for it."
    )


TracingSection = section_of(
    "TracingSection",
    TracingSettings,
    descriptions={
        "otlp_endpoint": "URL of an OpenTelemetry collector that takes OTLP over HTTP, as `http://localhost:4318`; "
        "`/v1/traces` is added where it has no path. Null makes no spans. Needs the extra `otel` on every machine.",
        "sample_ratio": "Share of the traces that begin here of which spans are made, 0 to 1; a request with a "
        "`traceparent` is followed in what that says. Null goes by `OTEL_TRACES_SAMPLER`, and without that takes all.",
        "service_name": "The resource's `service.name`; null takes `OTEL_SERVICE_NAME`, or `baton`.",
    },
)
