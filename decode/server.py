"""The decode worker: takes requests whose prompts were computed elsewhere, reads their KV, and generates the rest."""

from __future__ import annotations

from engine.frontend.server import EngineServer


class DecodeServer(EngineServer):
    """An engine whose requests say where the KV of their prompt can be read, or are prefilled here."""
