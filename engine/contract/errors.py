"""The engine's errors. Each message names the values involved and the remedy."""

from __future__ import annotations

from kv_transfer.errors import PortableError


class EngineError(PortableError):
    """Base class of the engine's errors."""


class ConfigError(EngineError):
    """Settings contradict each other or the machine. ``what`` and ``remedy`` are the parts of the message."""

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class CaptureRefusedError(EngineError):
    """Decode steps cannot be captured as graphs here."""


class CheckpointError(EngineError):
    """A directory cannot be loaded as a model."""


class RequestRefusedError(EngineError):
    """This engine can never serve the request; ``code`` is stable, for programs."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class PromptTooLongError(RequestRefusedError):
    """The prompt can never fit."""

    def __init__(self, *, num_prompt_tokens: int, max_prompt_tokens: int, why: str) -> None:
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens, but at most {max_prompt_tokens} fit: {why}",
            code="prompt_too_long",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens


class UnknownTokenError(RequestRefusedError):
    """The model has no such token."""

    def __init__(self, *, token_id: int, vocab_size: int) -> None:
        super().__init__(
            f"token id {token_id} is not in the model's vocabulary of {vocab_size} tokens", code="unknown_token"
        )


class DuplicateRequestError(RequestRefusedError):
    """The id is in use."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} is already in use", code="duplicate_request")


class OutOfBlocksError(EngineError):
    """The block pool cannot satisfy an allocation; nothing was taken."""

    def __init__(self, *, requested: int, free: int) -> None:
        super().__init__(f"{requested} KV blocks requested, {free} free")
        self.requested = requested
        self.free = free


class EngineDeadError(EngineError):
    """The engine's loop has ended, and no request can be served any more."""


class ConnectorDeadError(EngineDeadError):
    """The engine still runs, but its connector's thread has ended: it can neither read KV nor hand it over."""

    def __init__(self) -> None:
        super().__init__("the connector's thread stopped: KV can no longer be read or handed over")


class EngineStalledError(EngineDeadError):
    """The engine hangs: it has work, but no step has ended for too long."""

    def __init__(self, *, busy_s: float, step_timeout_s: float) -> None:
        super().__init__(
            f"the engine hangs: no step ended for {busy_s:.1f} s, the limit is {step_timeout_s:g} s "
            "(raise health.step_timeout_s if steps of this model take longer)"
        )


class ReadHangsError(EngineDeadError):
    """A read of KV hangs for good, and the worker, which should have left by now, is still here."""

    def __init__(self, *, hung_s: float) -> None:
        super().__init__(
            f"read hangs: a read of KV goes on {hung_s:.0f} s after it was given up (kv_transfer.hung_read_timeout_s), "
            "and the worker did not end by itself"
        )
