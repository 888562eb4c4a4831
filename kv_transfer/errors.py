"""What can go wrong while KV blocks move; every error names the values that disagree."""

from __future__ import annotations

from collections.abc import Callable


class PortableError(Exception):
    """An error that can be pickled and sent to another process, whatever arguments its constructor takes.

    By default pickle would call the constructor with the message alone.
    """

    def __reduce__(self) -> tuple[Callable[..., PortableError], tuple[object, ...]]:
        return _received, (type(self), self.args, self.__dict__)


def _received(kind: type[PortableError], args: tuple[object, ...], attributes: dict[str, object]) -> PortableError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class KVTransferError(PortableError):
    """Root of the errors of this package."""


class HandshakeRefusedError(KVTransferError):
    """Two engines met, and cannot exchange blocks."""

    def __init__(self, *, what: str, ours: object, theirs: object) -> None:
        super().__init__(f"handshake refused: {what} differs: ours is {ours!r}, the peer's is {theirs!r}")
        self.what = what
        self.ours = ours
        self.theirs = theirs


class PeerUnreachableError(KVTransferError):
    """The peer could not be met, or the connection to it broke."""

    def __init__(self, *, engine_id: str, reason: str) -> None:
        super().__init__(f"peer {engine_id} is unreachable: {reason}")
        self.engine_id = engine_id
        self.reason = reason


class UnknownConnectorError(KVTransferError):
    """The configuration names a connector that does not exist."""

    def __init__(self, *, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"connector: unknown KV connector {name!r}; known connectors: {', '.join(known)}")
        self.name = name


class InvalidOptionError(KVTransferError, ValueError):
    """An option of the configuration has an impossible value, or contradicts another option."""
