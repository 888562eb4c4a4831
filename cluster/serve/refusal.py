"""Values by which a worker's refusals cross process boundaries, since our exceptions do not survive pickling."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.errors import RequestRefusedError
from kv_transfer.errors import HandshakeRefusedError
from router.pool.workers import WorkerRefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that an engine will never serve."""

    code: str
    message: str

    @classmethod
    def of(cls, error: RequestRefusedError) -> Refusal:
        """The part of the engine's refusal that the caller needs."""
        return cls(code=error.code, message=str(error))

    def to_error(self) -> WorkerRefusedError:
        """The refusal as the router knows it."""
        return WorkerRefusedError(self.message, code=self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeRefusal:
    """A refused handshake. ``ours`` and ``theirs`` are from the point of view of the engine that refused."""

    what: str
    ours: str
    theirs: str

    @classmethod
    def of(cls, error: HandshakeRefusedError) -> HandshakeRefusal:
        """The refusal with its values as text."""
        return cls(what=error.what, ours=str(error.ours), theirs=str(error.theirs))

    def to_error(self) -> HandshakeRefusedError:
        """The same refusal from the other side's point of view."""
        return HandshakeRefusedError(what=self.what, ours=self.theirs, theirs=self.ours)
