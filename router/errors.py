"""The errors that can end a request. Each has a stable code, and a sentence with the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

OWN_ADMIN_KEY_FOLDER: Final = "~/.baton/admin-keys"
"""The file in the user's home where a cluster without configured admin keys stores the one that it made."""


class RouterError(Exception):
    """Base class of the errors that a caller of the router sees.

    ``code`` is stable, for programs; ``param`` names the parameter to blame, if any; ``retry_after_s`` is set if a
    later retry can help.
    """

    code = "internal_error"

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class InternalError(RouterError):
    """An unexpected error in the router itself, which was logged."""

    def __init__(self) -> None:
        super().__init__("an unexpected error in the router ended this request; the router's log has the details")


class InvalidRequestError(RouterError):
    """The request itself is wrong."""

    code = "invalid_request"


class UnsupportedParameterError(InvalidRequestError):
    """A parameter that is known but not supported, with a value that would change the answer.

    ``kind`` is that value if it is a name; ``hint`` says what to do instead.
    """

    def __init__(self, param: str, *, kind: str = "", hint: str = "") -> None:
        super().__init__(
            f"the parameter '{param}'{f' ({kind})' if kind else ''} is not supported{': ' + hint if hint else ''}",
            code="unsupported_parameter",
            param=param,
        )


class ContextLengthError(InvalidRequestError):
    """The prompt, alone or with the output tokens that ``param`` asks for, exceeds the model's context."""

    def __init__(
        self,
        *,
        num_prompt_tokens: int,
        max_model_len: int,
        max_tokens: int | None,
        param: str,
        is_at_least: bool = False,
    ) -> None:
        # Clients recognize the case by these words, which are OpenAI's.
        text = f"this model's maximum context length is {max_model_len} tokens, but the prompt has "
        if max_tokens is None:
            text += (
                f"{'at least ' if is_at_least else ''}{num_prompt_tokens} tokens, and at least 1 more is needed "
                "for the answer"
            )
        else:
            text += f"{num_prompt_tokens} tokens and {param} is {max_tokens}: together {num_prompt_tokens + max_tokens}"
        super().__init__(text, code="context_length_exceeded", param=param)


class UnknownModelError(RouterError):
    """The request names a model that is not served here."""

    code = "model_not_found"

    def __init__(self, *, model: str, served: Sequence[str]) -> None:
        names = ", ".join(repr(name) for name in served)
        super().__init__(f"the model {model!r} does not exist; served here: {names}", param="model")


class BodyTooLargeError(RouterError):
    """The body is larger than the router reads."""

    code = "body_too_large"

    def __init__(self, *, max_body_bytes: int) -> None:
        super().__init__(f"the request body is larger than {max_body_bytes} bytes")


class TooManyValuesError(RouterError):
    """The body, or something made from it, has so many JSON values that validating it would delay all others."""

    code = "too_many_values"

    def __init__(
        self, *, num_values: int, num_objects: int, max_body_values: int, subject: str = "the body has"
    ) -> None:
        super().__init__(
            f"{subject} {num_values} JSON values, {num_objects} of them objects; the limit is {max_body_values}, "
            "and an object counts as 25 values"
        )


class BodyNotJsonError(RouterError):
    """The body does not say that it is JSON.

    Web pages can make a visitor's browser send other media types anywhere, even to a server on the same machine.
    """

    code = "unsupported_media_type"

    def __init__(self, *, media_type: str) -> None:
        given = f"is {media_type[:80]!r}" if media_type else "is missing"
        super().__init__(f"the header Content-Type {given}: send the body as application/json")


class BodyEncodedError(RouterError):
    """The body is compressed. A server cannot know in advance how large such a body becomes."""

    code = "unsupported_content_encoding"

    def __init__(self, *, coding: str) -> None:
        super().__init__(
            f"the header Content-Encoding is {coding[:80]!r}: send the body uncompressed and without that header"
        )


class BodyTimeoutError(RouterError):
    """The body did not arrive in time."""

    code = "body_timeout"

    def __init__(self, *, timeout_s: float) -> None:
        super().__init__(f"the request body did not arrive within {timeout_s:g} s")


class BodiesFullError(RouterError):
    """Other requests' bodies take all the room for bodies."""

    code = "bodies_full"

    def __init__(self, *, max_reading_bytes: int, retry_after_s: float) -> None:
        super().__init__(
            f"the limit of {max_reading_bytes} bytes of request bodies that are read at the same time is reached; "
            "try again later",
            retry_after_s=retry_after_s,
        )


class HeadersTooLargeError(RouterError):
    """The request has more headers, or longer ones, than the router reads."""

    code = "headers_too_large"

    def __init__(self, *, max_num_headers: int, max_header_bytes: int) -> None:
        super().__init__(
            f"the request's URL and headers exceed the limit of {max_num_headers} headers or {max_header_bytes} bytes"
        )


class HeadersTimeoutError(RouterError):
    """The headers of a request did not arrive in time."""

    code = "headers_timeout"

    def __init__(self, *, timeout_s: float) -> None:
        super().__init__(f"the request's headers did not arrive within {timeout_s:g} s")


class TooManyConnectionsError(RouterError):
    """The limit of open connections is reached, and all are in use."""

    code = "too_many_connections"

    def __init__(self, *, retry_after_s: float) -> None:
        super().__init__(
            "the limit of open connections is reached, and all are in use; try again later", retry_after_s=retry_after_s
        )


class TooManyPipelinedError(RouterError):
    """A client sent more requests ahead than may wait for the answers to those before."""

    code = "too_many_pipelined"

    def __init__(self, *, max_num_pipelined: int) -> None:
        super().__init__(
            f"a connection may send at most {max_num_pipelined} further requests while it waits for an answer: read "
            "the answers first, or open another connection"
        )


_OWN_KEY_HINT: Final = (
    f" (the key that the cluster made is in {OWN_ADMIN_KEY_FOLDER} of the user who started it, on its machine)"
)


class InvalidApiKeyError(RouterError):
    """The request has no API key, or an unknown one."""

    code = "invalid_api_key"

    def __init__(self, *, is_missing: bool, admin_path: str = "", is_own: bool = False) -> None:
        """``admin_path`` is a path that only an admin key opens, ``is_own`` says that the cluster made that key."""
        text = (
            "no API key was sent: send one in the header 'Authorization: Bearer KEY'"
            if is_missing
            else "the API key is unknown"
        )
        if admin_path:
            text += f"; {admin_path[:80]} needs the admin key" if is_own else f"; {admin_path[:80]} needs an admin key"
        super().__init__(text + (_OWN_KEY_HINT if admin_path and is_own else ""))


class AdminKeyError(RouterError):
    """The key is valid, but not for this."""

    code = "admin_key_required"

    def __init__(self, *, path: str, has_any: bool, is_own: bool = False) -> None:
        hint = "; none is configured: set security.admin_keys"
        if has_any:
            hint = (
                ", but the key that was sent is a user's: send one in the header 'Authorization: Bearer KEY', or with "
                f"Baton's commands in BATON_ADMIN_KEY or --api-key{_OWN_KEY_HINT if is_own else ''}"
            )
        super().__init__(f"{path[:80]} needs an admin key{hint}")


class AdminClosedError(RouterError):
    """This router takes no orders to workers."""

    code = "admin_api_closed"

    def __init__(self) -> None:
        super().__init__(
            "the admin API is disabled: configure an admin key (security.admin_keys), and set router.admin_api to true "
            "if it is false"
        )


class HostNotAllowedError(RouterError):
    """The request's Host header has a name that is not allowed."""

    code = "host_not_allowed"

    def __init__(self, *, host: str) -> None:
        super().__init__(
            f"the header Host is {host[:80]!r}, but without API keys only names of this machine are allowed, such as "
            "localhost and 127.0.0.1; add the name to security.allowed_hosts, or configure "
            "security.api_keys"
        )


class OriginNotAllowedError(RouterError):
    """The request comes from a web page whose origin is not allowed."""

    code = "origin_not_allowed"

    def __init__(self, *, origin: str) -> None:
        super().__init__(
            f"web pages from {origin[:80]!r} (the header Origin) may not call this API, because it requires no key; "
            "add the origin to security.cors_allow_origins"
        )


class UnknownReplicaError(RouterError):
    """The name is not that of exactly one worker."""

    code = "replica_not_found"

    def __init__(self, *, name: str, num_found: int, known: Sequence[str], param: str = "replica") -> None:
        problem = (
            f"{num_found} workers have ids that begin with {name!r}" if num_found else f"there is no worker {name!r}"
        )
        super().__init__(f"{problem}; known workers: {', '.join(sorted(known)) or 'none'}", param=param)


class NoReplicaError(RouterError):
    """There is no healthy replica for a step that the request needs."""

    code = "no_healthy_replica"

    def __init__(self, *, role: str, retry_after_s: float, reason: str = "") -> None:
        super().__init__(
            f"no healthy {role} replica{': ' + reason if reason else ''}; try again later", retry_after_s=retry_after_s
        )


class QueueFullError(RouterError):
    """The limit of requests in progress or waiting is reached."""

    code = "queue_full"


class TooManyWatchersError(RouterError):
    """The limit of watchers at this router is reached."""

    code = "too_many_watchers"

    def __init__(self, *, max_watchers: int) -> None:
        super().__init__(
            f"{max_watchers} streams of /admin/events are open at this router, which is the limit: close one",
            retry_after_s=1.0,
        )


def is_refusal(error: RouterError, *, num_output_tokens: int) -> bool:
    """True if a request was refused for lack of capacity, before anything was generated for it."""
    return isinstance(error, QueueFullError) and num_output_tokens == 0


class DeadlineExceededError(RouterError):
    """The request did not finish by its deadline."""

    code = "deadline_exceeded"

    def __init__(self, *, timeout_s: float, stage: str) -> None:
        super().__init__(f"the request did not finish within {timeout_s:g} s (it was in: {stage})")


class WorkerFailedError(RouterError):
    """Workers failed, and trying elsewhere did not help; ``code`` may be the engine's own."""

    code = "worker_failed"


class RequestCancelledError(RouterError):
    """The consumer of the tokens cancelled the request, so nobody reads this error."""

    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


class ModelDirectoryError(Exception):
    """The model directory cannot be served; the message is one line that says why."""


class ResponseNotFoundError(RouterError):
    """There is no such response, or it belongs to another key."""

    code = "response_not_found"

    def __init__(self, *, response_id: str) -> None:
        super().__init__(
            f"there is no response {response_id[:200]!r}: a router keeps a limited number of responses in memory for a "
            "limited time, unless 'store' is false; to continue older conversations, send their messages again",
            param="response_id",
        )


class TraceNotFoundError(RouterError):
    """There is no trace of such a request, or the request belongs to another key."""

    code = "trace_not_found"

    def __init__(self, *, request_id: str) -> None:
        super().__init__(
            f"there is no trace of a request {request_id[:200]!r}: a router keeps the last router.trace_requests "
            "traces of a share router.trace_sample_rate of all requests; the id must be the X-Request-Id of the "
            "answer or the id in its body",
            param="request_id",
        )


class ResponseUnreachableError(RouterError):
    """The router that keeps a response does not answer now."""

    code = "response_unreachable"

    def __init__(self, *, response_id: str, router_id: str, retry_after_s: float) -> None:
        super().__init__(
            f"the router {router_id}, which keeps the response {response_id[:200]!r}, does not answer; try again later",
            retry_after_s=retry_after_s,
        )
