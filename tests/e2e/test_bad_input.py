"""Mistakes that the user can correct give one line and exit code 2, before anything is served."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from pathlib import Path

import psutil
import pytest

from cluster.config.names import FORK_SERVER
from tests.support.cluster.cluster import ClusterProcess, assert_left_nothing, run_baton
from tests.support.engine.checkpoints import make_checkpoint


def assert_refused(*arguments: str, naming: tuple[str, ...]) -> None:
    """The command ends with code 2 and one line on standard error that holds all of ``naming``."""
    result = run_baton(*arguments)

    lines = result.stderr.splitlines()
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("baton: error: ")
    assert all(text in lines[0] for text in naming), lines[0]
    assert not result.stdout


@pytest.fixture
def checkpoint(served_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(served_model, tmp_path / "model"))


def test_directory_without_checkpoint(tmp_path: Path) -> None:
    assert_refused("serve", "--model", str(tmp_path), naming=(str(tmp_path), "config.json"))


def test_missing_directory(tmp_path: Path) -> None:
    assert_refused("serve", "--model", str(tmp_path / "none"), naming=(str(tmp_path / "none"), "not a directory"))


def test_unsupported_architecture_lists_the_supported_ones(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "architectures": ["OPTForCausalLM"]}))

    assert_refused(
        "serve", "--model", str(checkpoint), naming=("OPTForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM")
    )


def test_missing_shard(served_model: Path, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "sharded", "llama", max_shard_size="100KB")
    for file in served_model.glob("tokenizer*"):
        shutil.copy(file, model)
    missing = sorted(model.glob("model-*.safetensors"))[1]
    missing.unlink()

    assert_refused("serve", "--model", str(model), naming=("missing", missing.name))


def test_truncated_shard(checkpoint: Path) -> None:
    shard = checkpoint / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])

    assert_refused("serve", "--model", str(checkpoint), naming=(str(shard), "truncated"))


def test_missing_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()

    assert_refused("serve", "--model", str(checkpoint), naming=("tokenizer.json",))


def test_port_in_use(served_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        assert_refused(
            "serve", "--model", str(served_model), "--port", str(port), naming=(f"127.0.0.1:{port}", "in use")
        )


def test_typo_in_the_configuration_names_the_nearest_key(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("prefil_replicas: 2\n")

    assert_refused("serve", "--config", str(file), naming=(str(file), "'prefil_replicas'", "'prefill_replicas'"))


def test_missing_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"

    assert_refused("serve", "--config", str(file), naming=(str(file), "No such file"))


def test_device_that_is_not_there(served_model: Path) -> None:
    assert_refused("serve", "--model", str(served_model), "--device", "tpu", naming=("device", "'tpu'"))


def test_generate_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert_refused("generate", "--prompt", "x", "--model", str(tmp_path), naming=("config.json",))


def test_worker_that_refuses_its_settings_ends_the_start(served_model: Path) -> None:
    cluster = ClusterProcess({"model": str(served_model), "cache": {"num_blocks": 4}})
    try:
        code = cluster.wait_for_exit()

        assert code == 2, cluster.log
        errors = [line for line in cluster.log.splitlines() if line.startswith("baton: error: ")]
        assert len(errors) == 1, cluster.log
        assert "max_model_len" in errors[0]
        assert "Traceback" not in cluster.log
        assert_left_nothing(cluster, [])
    finally:
        cluster.close()


def test_start_interrupted_before_ray_leaves_nothing(served_model: Path) -> None:
    cluster = ClusterProcess({"model": str(served_model)})
    try:
        cluster.wait_for_session_folder()
        processes = cluster.processes()

        code = cluster.stop()

        assert code == 130, cluster.log
        assert_left_nothing(cluster, processes)
    finally:
        cluster.close()


def test_interrupted_start_leaves_nothing(served_model: Path) -> None:
    cluster = ClusterProcess({"model": str(served_model)})
    try:
        cluster.wait_for_output("starting Ray Serve")
        processes = cluster.processes()

        code = cluster.stop()

        assert code == 130, cluster.log
        assert len(processes) > 3
        assert_left_nothing(cluster, processes)
    finally:
        cluster.close()


def test_start_whose_ray_ends_meanwhile_begins_once_more(served_model: Path) -> None:
    cluster = ClusterProcess({"model": str(served_model)})
    helpers: list[psutil.Process] = []
    try:
        cluster.wait_for_output("starting Ray Serve")
        first = cluster.processes()
        staying = {process for process in first if process.pid == cluster.pid or FORK_SERVER in process.cmdline()}
        raylet = cluster.process_named("raylet")
        helpers = raylet.children()
        for helper in helpers:  # some outlive it for a minute, and want to tell a server that is gone
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.suspend()
        raylet.kill()

        cluster.wait_for_output("Serving")

        assert "starting it once more" in cluster.log
        processes = cluster.processes()
        assert {*first} & {*processes} == staying
        assert cluster.stop() == 0, cluster.log
        assert_left_nothing(cluster, [*first, *processes])
    finally:
        cluster.close()
        for helper in helpers:
            with contextlib.suppress(psutil.NoSuchProcess):
                helper.kill()
