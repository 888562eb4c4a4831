"""What can go wrong while KV blocks move; every error names the values that disagree."""

from __future__ import annotations


class KVTransferError(Exception):
    """Root of the errors of this package."""


class HandshakeRefusedError(KVTransferError):
    """Two engines met and do not fit together."""

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
        super().__init__(f"unknown KV connector {name!r}; known connectors: {', '.join(known)}")
        self.name = name


class InvalidOptionError(KVTransferError, ValueError):
    """An option of the configuration has a value that cannot be, or contradicts another one."""
