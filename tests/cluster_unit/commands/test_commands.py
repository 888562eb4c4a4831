"""The commands that need no cluster, or only its HTTP side."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import IO

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app, main
from cluster.client import cluster_url, explain
from cluster.commands.clients.chat import ChatInputError, ask, greeting
from cluster.commands.clients.status import COLUMNS, print_table, status_table, totals_line
from cluster.commands.generate import GenerateOptions, generate
from cluster.commands.welcome import open_api_warning, welcome
from cluster.config.config import BatonConfig
from cluster.config.served_model import BUILTIN_MODEL_NAME, BUILTIN_QUESTION, ServedModel
from cluster.plan.preflight import PreflightError
from engine.contract.errors import ConfigError
from engine.model.builtin import builtin_model_dir


def run_generate(**changes: object) -> str:
    options = {
        "model": None,
        "prompt": "Once",
        "max_tokens": 12,
        "temperature": 0.0,
        "seed": 0,
        "device": "cpu",
        "dtype": "float32",
    }
    output = io.StringIO()
    generate(GenerateOptions(**{**options, **changes}), output)  # type: ignore[arg-type]
    return output.getvalue()


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])

    assert (result.exit_code, result.output) == (0, f"baton {version('baton-serve')}\n")


def run_to(output: IO[str], *command: str) -> tuple[int, str]:
    """The exit code and the errors of a command whose standard output goes to a file."""
    words = [sys.executable, "-c", "from cluster.cli import main; main()", *command]
    done = subprocess.run(words, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["--help", "--version"])
def test_output_that_cannot_be_written_is_told_in_a_line(command: str) -> None:
    """/dev/full is a file on a disk that is full."""
    with Path("/dev/full").open("w") as full:
        assert run_to(full, command) == (1, "baton: error: the output cannot be written: No space left on device\n")


def test_reader_that_went_away_is_told_nothing() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as unread:
        assert run_to(unread, "--version") == (1, "")


def test_name_that_the_terminal_cannot_show_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("served_model_name: 模型\ndevice: cpu\ndtype: float32\n", encoding="utf-8")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "argv", ["baton", "plan", "--config", str(file)])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", io.StringIO())
        with pytest.raises(SystemExit) as ended:
            main()

    assert ended.value.code == 0
    stdout.seek(0)
    assert "model \\u6a21\\u578b: " in stdout.read()


def test_generate_continues_a_text_with_the_built_in_model() -> None:
    assert len(run_generate().encode()) > 1


def test_generate_answers_a_question_as_in_a_chat() -> None:
    assert run_generate(prompt="What is 47 + 35?", max_tokens=20, is_chat=True) == "47 + 35 = 82.\n"


def test_generate_needs_a_template_to_answer_as_in_a_chat(tmp_path: Path) -> None:
    for file in builtin_model_dir().iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).symlink_to(file)

    with pytest.raises(ConfigError, match=f"{tmp_path} has no chat template: leave --chat out"):
        run_generate(model=tmp_path, is_chat=True)


def test_generate_repeats_itself_for_a_seed() -> None:
    sampled = [run_generate(temperature=1.0, seed=seed) for seed in (1, 1, 2)]

    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]


def test_generate_refuses_a_prompt_that_is_no_text() -> None:
    with pytest.raises(ConfigError, match="not valid UTF-8 at character 3"):
        run_generate(prompt="caf\udce9")


def test_generate_refuses_more_tokens_than_the_model_has_room_for() -> None:
    with pytest.raises(ConfigError, match=r"max_tokens is 99999: together \d+, but the model's context length is \d+"):
        run_generate(max_tokens=99_999)


def test_generate_without_a_length_ends_by_itself() -> None:
    assert run_generate(max_tokens=None).endswith("\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_chat_refuses_a_line_that_is_no_text(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors=errors))

    with pytest.raises(ChatInputError, match="not valid UTF-8"):
        ask(Console(file=io.StringIO()))


def test_status_table_has_a_row_for_each_worker() -> None:
    answer = {
        "model": "m",
        "pools": {
            "prefill": [{"replica_id": "abc", "pid": 41, "kv_usage": 0.25, "num_running": 1}],
            "decode": [{"replica_id": "def", "pid": 42, "kv_usage": 0.5, "num_running": 2}],
        },
    }
    console = Console(file=io.StringIO(), width=160)

    console.print(status_table(answer))

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(word in text for word in ("prefill", "abc", "41", "25.0%", "decode", "def", "42", "50.0%"))


@pytest.mark.parametrize(("node", "width"), [("192.168.100.100", 80), ("fd00:1234:5678:9abc:def0:1234:5678:9abc", 40)])
def test_status_table_cuts_nothing(node: str, width: int) -> None:
    replica = {"replica_id": "abcdefgh", "node_ip": node, "pid": 4194304, "state": "healthy", "kv_usage": 1.0}
    console = Console(file=io.StringIO(), width=width)

    print_table(status_table({"model": "m", "pools": {"prefill": [replica]}}), console)

    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(any(title in line for line in lines) for title, _ in COLUMNS)
    assert any(all(word in line for word in ("prefill", "abcdefgh", node, "4194304", "100.0%")) for line in lines)
    assert width < 80 or max(len(line.rstrip()) for line in lines) <= width


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000", "http://localhost:8000"),
        ("https://host/x", "https://host/x"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("localhost:8000/v1///", "http://localhost:8000"),
        ("https://host/x/v1/", "https://host/x"),
        ("https://host/v1.5", "https://host/v1.5"),
    ],
)
def test_url_may_lack_its_scheme_and_name_the_root_of_the_api(text: str, url: str) -> None:
    assert cluster_url(text) == url


@pytest.mark.parametrize("text", ["ftp://localhost", "localhost:port", "localhost:99999", ""])
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(PreflightError, match=r"is not an? (HTTP )?URL"):
        cluster_url(text)


@pytest.mark.parametrize("text", ["http://localhost/v1?key=1", "http://localhost/#v1"])
def test_url_with_more_than_a_path_is_refused(text: str) -> None:
    with pytest.raises(PreflightError, match="leave out its query and fragment"):
        cluster_url(text)


def test_refused_connection_asks_whether_anything_runs() -> None:
    assert "is `baton serve` running" in explain(httpx.ConnectError("refused"), "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (
            401,
            {"error": {"message": "no API key was sent"}},
            "answered 401: no API key was sent; set it with --api-key",
        ),
        (404, {"detail": "Not Found"}, "is that a Baton cluster? --url must be the base URL of its API"),
    ],
)
def test_error_answer_that_the_caller_can_mend_says_how(status: int, body: object, line: str) -> None:
    request = httpx.Request("GET", "http://x/status")
    response = httpx.Response(status, json=body, request=request)

    assert line in explain(httpx.HTTPStatusError(str(status), request=request, response=response), "http://x")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number"), "does not speak TLS"),
        (httpx.ReadTimeout("timed out"), "did not answer in time (ReadTimeout)"),
    ],
)
def test_server_that_cannot_be_spoken_with_is_told_from_none(error: httpx.HTTPError, line: str) -> None:
    assert line in explain(error, "https://x")


def test_worker_that_is_not_there_does_not_put_the_cluster_in_doubt() -> None:
    request = httpx.Request("POST", "http://x/admin/drain")
    response = httpx.Response(404, json={"error": {"message": "no worker 'abc'"}}, request=request)

    line = explain(httpx.HTTPStatusError("404", request=request, response=response), "http://x")

    assert line == "http://x answered 404: no worker 'abc'"


def test_error_answer_is_shown_with_its_message() -> None:
    request = httpx.Request("GET", "http://x/v1/models")
    response = httpx.Response(503, json={"error": {"message": "no healthy replica"}}, request=request)

    line = explain(httpx.HTTPStatusError("503", request=request, response=response), "http://x")

    assert line == "http://x answered 503: no healthy replica"


def test_chat_with_the_builtin_model_says_what_to_ask() -> None:
    assert BUILTIN_QUESTION in greeting(BUILTIN_MODEL_NAME)
    assert BUILTIN_QUESTION not in greeting("my-model")


def test_serve_prints_a_request_that_a_shell_sends_to_any_model() -> None:
    model = ServedModel(path=Path("/models/mine"), name="it's mine")

    printed = welcome(BatonConfig(port=9000), model, logs="/tmp/logs")

    assert "Logs: /tmp/logs" in printed.splitlines()
    *_, command = shlex.split(printed.splitlines()[-1])

    assert json.loads(command) == {"model": "it's mine", "messages": [{"role": "user", "content": "Hello!"}]}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, None),
        ({"host": "localhost"}, None),
        ({"host": "127.0.0.2"}, None),
        ({"host": "0.0.0.0"}, "any web page"),
        ({"host": "10.0.0.5", "security": {"admin_keys": [f"sha256:{'0' * 64}"]}}, "10.0.0.5:8000"),
        ({"host": "0.0.0.0", "security": {"api_keys": [f"sha256:{'0' * 64}"]}}, None),
    ],
)
def test_api_that_is_open_to_others_is_warned_of(values: dict[str, object], told: str | None) -> None:
    warning = open_api_warning(BatonConfig.model_validate(values))

    assert (warning is None) == (told is None)
    assert told is None or told in (warning or "")


def test_status_table_tells_what_a_worker_of_another_pool_leans_to() -> None:
    row = {"node_ip": "127.0.0.1", "pid": 4194304, "state": "running", "kv_usage": 1.0}
    answer = {
        "model": "m",
        "pools": {
            "prefill": [{"replica_id": "abcdefgh", "leaning": "decode", **row}],
            "decode": [{"replica_id": "ijklmnop", "leaning": "decode", **row}],
        },
    }
    console = Console(file=io.StringIO(), width=80)

    print_table(status_table(answer), console)

    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert any("prefill→decode abcdefgh" in line for line in lines)
    assert any("decode         ijklmnop" in line for line in lines)
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_status_tells_of_moves_and_failures_once_there_are_any() -> None:
    totals = {"requests": 1200, "tokens": 7, "migrations": 0, "drain_moves": 3, "failed": 1, "finished": 9}
    assert totals_line(totals) == "requests 1,200, tokens 7, failed 1, drain_moves 3"
    assert totals_line({}) == ""
