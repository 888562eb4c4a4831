"""Fakes for commands that deploy: a Ray, and a router that is ready."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.cluster.fake_ray import FakeRay, fake_ray


class Ready(BaseHTTPRequestHandler):
    """A router that is ready."""

    def do_GET(self) -> None:
        """Say so."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where a router answers that it is ready."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    with fake_ray() as fake:
        yield fake
