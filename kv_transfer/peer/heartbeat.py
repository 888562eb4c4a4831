"""Renews the leases under which this engine will read, and releases those that it does not need."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.params import KVTransferParams
from kv_transfer.peer.notifications import Notification, Release, Renew
from kv_transfer.peer.peers import Handshake, Peer, PeerTable

_MAX_PENDING_RELEASES = 4096
_MAX_LEASES_PER_RENEWAL = 1024


class Heartbeat:
    """The leases that peers hold for us. Owned by the connector's thread.

    All leases are renewed together, once per period, with one message per peer. If a peer is unknown, its handshake
    begins now, so that it is over before the load begins. Releases wait for the handshake, and their number is bounded.
    If a release is lost, the lease only lasts until the end of its time-to-live.
    """

    def __init__(
        self,
        *,
        peers: PeerTable,
        clock: Callable[[], float],
        period_s: float,
        send: Callable[[Peer, Notification], None],
    ) -> None:
        self._peers = peers
        self._clock = clock
        self._period_s = period_s
        self._send = send
        self._next_s = clock() + period_s
        self._awaited: dict[str, KVTransferParams] = {}
        self._releases: list[tuple[Handshake, KVTransferParams]] = []

    def expect(self, params: KVTransferParams) -> None:
        """Renew a lease until ``forget``, ``release`` or ``pass_on``."""
        self._awaited[params.lease_id] = params
        if self._peers.find(params.source) is None:
            self._peers.meet(params.source)

    def forget(self, params: KVTransferParams) -> None:
        """Stop renewing a lease."""
        self._awaited.pop(params.lease_id, None)

    def pass_on(self, params: KVTransferParams) -> None:
        """Renew a lease one last time: from now on another engine may read under it."""
        peer = self._peers.find(params.source)
        if self._awaited.pop(params.lease_id, None) is not None and peer is not None:
            self._send(peer, Renew(lease_ids=(params.lease_id,)))

    def release(self, params: KVTransferParams) -> None:
        """Tell the peer that its lease can end."""
        self.forget(params)
        if self._peers.find(params.source) is not None:
            self._send_release(params)
        elif len(self._releases) < _MAX_PENDING_RELEASES:
            self._releases.append((self._peers.meet(params.source), params))

    def advance(self) -> bool:
        """Send what is due; True when anything was sent."""
        did_anything = self._flush_releases()
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + self._period_s
            did_anything |= self._renew()
        return did_anything

    def _renew(self) -> bool:
        lease_ids: dict[str, list[str]] = {}
        peers: dict[str, Peer] = {}
        for params in self._awaited.values():
            peer = self._peers.find(params.source)
            if peer is None:
                self._peers.meet(params.source)
            else:
                peers[peer.name] = peer
                lease_ids.setdefault(peer.name, []).append(params.lease_id)
        for name, ids in lease_ids.items():
            for start in range(0, len(ids), _MAX_LEASES_PER_RENEWAL):
                self._send(peers[name], Renew(lease_ids=tuple(ids[start : start + _MAX_LEASES_PER_RENEWAL])))
        return bool(lease_ids)

    def _flush_releases(self) -> bool:
        finished = [params for handshake, params in self._releases if handshake.is_finished]
        if finished:
            self._releases = [entry for entry in self._releases if not entry[0].is_finished]
            for params in finished:
                self._send_release(params)
        return bool(finished)

    def _send_release(self, params: KVTransferParams) -> None:
        peer = self._peers.find(params.source)
        if peer is not None:
            self._send(peer, Release(lease_id=params.lease_id))
