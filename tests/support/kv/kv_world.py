"""Engines for contract tests: readers in this process, sources in the process that the connector needs."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

from kv_transfer.inproc import InProcessFabric
from kv_transfer.transfer_options import TransportChoice
from tests.support.engine.kv_engine import KVEngine, KVEngineSpec
from tests.support.kv.kv_child import ChildProcess, PipeRendezvous


class KVWorld:
    """Engines of one connector. Closing it closes them, and ends the process that it started."""

    def __init__(self, connector: str, *, tiers: tuple[str, ...] = (), transport: TransportChoice = "network") -> None:
        self.connector = connector
        self.transport: TransportChoice = transport
        self.tiers = tiers
        self.folder = TemporaryDirectory(prefix="baton-tier-") if tiers else None
        self.fabric = InProcessFabric()
        self.rendezvous = PipeRendezvous()
        self.child = ChildProcess() if connector == "nixl" else None
        self.engines: list[Any] = []
        self._serial = itertools.count()

    def unique(self, name: str) -> str:
        """A name that was not used before."""
        return f"{name}-{next(self._serial)}"

    def seed(self) -> int:
        """A seed that was not used before."""
        return next(self._serial)

    def spec(self, name: str, **changes: Any) -> KVEngineSpec:
        """A spec with an engine id of its own."""
        spec = KVEngineSpec(engine_id=self.unique(name), connector=self.connector, transport=self.transport)
        if self.tiers:
            spec = replace(
                spec,
                connector="chain",
                chain=(*self.tiers, self.connector),
                num_tier_blocks=16,
                tier_folder=self.folder.name if self.folder is not None else None,
            )
        return replace(spec, **changes)

    def make_reader(self, spec: KVEngineSpec) -> KVEngine:
        """An engine in this process."""
        engine = KVEngine(spec, self.rendezvous, self.fabric)
        self.engines.append(engine)
        return engine

    def make_source(self, spec: KVEngineSpec) -> Any:
        """An engine to read from: in the other process if there is one."""
        if self.child is None:
            return self.make_reader(spec)
        engine = self.child.create(spec)
        self.rendezvous.engines[spec.engine_id] = engine
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        """Close all engines, then the process."""
        with ExitStack() as stack:
            if self.folder is not None:
                stack.callback(self.folder.cleanup)
            if self.child is not None:
                stack.callback(self.child.close)
                self.child.go_on()
            for engine in reversed(self.engines):
                stack.callback(engine.close)
