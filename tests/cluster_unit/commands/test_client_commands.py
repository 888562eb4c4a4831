"""Commands that use HTTP, when the server is not a cluster or a report cannot be written."""

from __future__ import annotations

import http.server
import io
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.chaos.scenario import ScenarioError
from cluster.cli import app
from cluster.client import explain
from cluster.commands.clients.chaos import chaos, teller

SCENARIO = Path(__file__).parents[3] / "deploy" / "chaos" / "decode-killed.yaml"
BODIES = {"html": b"<!doctype html>", "object": b'{"status": "ok"}', "list": b"[]", "no models": b'{"data": []}'}


class Other(http.server.BaseHTTPRequestHandler):
    """Answers everything with the same body."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def other(request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Handler", (Other,), {"body": BODIES[request.param]})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("other", "command"),
    [("html", ["status"]), ("object", ["drain", "x"]), ("list", ["status", "--json"]), ("no models", ["chat"])],
    indirect=["other"],
)
def test_something_else_that_answers_is_said_to_be_no_cluster(other: str, command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--url", other])

    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"the server at {other} is not a Baton cluster: " in result.stderr


def test_report_that_cannot_be_written_is_refused_before_anything_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "report.json"

    with pytest.raises(ScenarioError, match=f"cannot write the report to {file}: No such file"):
        chaos("http://127.0.0.1:1", SCENARIO, Console(file=io.StringIO()), json_file=file)


def test_lines_of_a_scenario_are_not_broken_in_files() -> None:
    out, line = io.StringIO(), "a word " * 40 + ":x: [red]"

    teller(Console(file=out))(line)

    assert out.getvalue() == f"{line}\n"


def test_url_without_a_port_is_told_which_one_was_asked() -> None:
    error = httpx.ConnectError("refused")

    assert "(port 80; Baton's default is 8000)" in explain(error, "http://localhost")
    assert "port" not in explain(error, "http://localhost:8000")


def test_name_that_does_not_resolve_is_said_to_be_none() -> None:
    error = httpx.ConnectError("[Errno -2] Name or service not known")
    error.__cause__ = socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    assert "the host name is unknown" in explain(error, "http://nowhere.invalid:8000")


@pytest.mark.parametrize(
    ("message", "variable"), [("this needs an admin key", "BATON_ADMIN_KEY"), ("the API key is wrong", "BATON_API_KEY")]
)
def test_refused_key_names_the_variable_of_its_kind(message: str, variable: str) -> None:
    request = httpx.Request("GET", "http://x/status")
    response = httpx.Response(401, json={"error": {"message": message}}, request=request)

    assert f"or in the variable {variable}" in explain(
        httpx.HTTPStatusError("", request=request, response=response), "http://x"
    )
