"""The sample configurations: each loads, and fits the machines that it is meant for."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config.config_file import load_config
from cluster.plan.inventory import load_nodes

DEPLOY = Path(__file__).parents[2] / "deploy"
SAMPLES = {"baton": None, "two-plus-two": "nodes", "four-plus-eight": "nodes-large"}
"""Samples, and the machines they are for; None: this one."""


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_is_planned_on_its_machines(name: str) -> None:
    nodes = SAMPLES[name]
    options = ["--config", str(DEPLOY / f"{name}.yaml")]
    if nodes is not None:
        from engine.model.builtin import builtin_model_dir

        options += ["--nodes", str(DEPLOY / f"{nodes}.yaml"), "--model", str(builtin_model_dir())]

    result = CliRunner().invoke(app, ["plan", *options])

    assert result.exit_code == 0, result.output
    config = load_config(DEPLOY / f"{name}.yaml", {})
    assert f"prefill: {config.prefill_replicas} worker" in result.output
    assert f"decode: {config.decode_replicas} worker" in result.output


def test_large_sample_puts_one_worker_on_each_gpu() -> None:
    from engine.model.builtin import builtin_model_dir

    options = ["--config", str(DEPLOY / "four-plus-eight.yaml"), "--nodes", str(DEPLOY / "nodes-large.yaml")]

    output = CliRunner().invoke(app, ["plan", *options, "--model", str(builtin_model_dir())]).output

    assert "head: 0 CPUs, 16.0 GiB -> nothing" in output
    assert "-> 4 prefill, 1 router" in output
    assert output.count("-> 4 decode, 1 router") == 2
    assert "decode: 8 workers (4 to 8, depending on the load), each:" in output


def test_own_machines_are_those_that_the_page_deploys_two_plus_two_on() -> None:
    """Whoever only fills in addresses has as many machines for each pool as the sample and its plan."""
    command = yaml.safe_load((DEPLOY / "own-machines.yaml").read_text())["worker_start_ray_commands"][-1]
    config = load_config(DEPLOY / "two-plus-two.yaml", {})
    counts = Counter(pool for node in load_nodes(DEPLOY / "nodes.yaml") for pool in node.resources)

    listed = [len(addresses.split()) for addresses in re.findall(r"'([0-9. ]+)'", command)]

    assert listed == [config.prefill_replicas, config.decode_replicas]
    assert counts == {"baton_prefill": config.prefill_replicas, "baton_decode": config.decode_replicas}


def test_plan_that_does_not_fit_says_what_is_missing_and_fails(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text("nodes: [{cpus: 8, memory_gib: 32, gpus: 1, gpu_memory_gib: 80, resources: {baton_prefill: 1}}]")
    from engine.model.builtin import builtin_model_dir

    options = ["--config", str(DEPLOY / "two-plus-two.yaml"), "--nodes", str(nodes)]

    result = CliRunner().invoke(app, ["plan", *options, "--model", str(builtin_model_dir())])

    assert result.exit_code == 2
    assert "decode replica 1 fits on no machine" in result.output
    assert "no machine offers 0.001 baton_decode" in result.output


def test_cluster_that_is_planned_on_a_machine_without_gpus_asks_for_a_list_of_those_that_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch  # imported late, as what is tested does

    from engine.model.builtin import builtin_model_dir

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = str(DEPLOY / "two-plus-two.yaml")
    result = CliRunner().invoke(app, ["plan", "--config", config, "--model", str(builtin_model_dir())])

    assert "set device to cpu or auto, or list the machines with --nodes" in f"{result.exception}{result.output}"


def test_list_of_machines_is_no_remedy_for_what_no_machine_would_mend(tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text("device: cpu\ncache: {memory_bytes: 1}\n")
    result = CliRunner().invoke(app, ["plan", "--config", str(config)])

    assert result.exit_code != 0
    assert "--nodes" not in f"{result.exception}{result.output}"


def test_unknown_key_of_a_nodes_file_is_named(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text("nodes: [{cpu: 8, memory_gib: 32}]")

    result = CliRunner().invoke(app, ["plan", "--nodes", str(nodes)])

    assert "cpu" in str(result.exception)
