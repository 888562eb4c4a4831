"""The plan: what fits, what does not and why, and the arithmetic of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.commands.plan import report
from cluster.config.config import BatonConfig
from cluster.config.config_file import ConfigFileError
from cluster.config.served_model import ServedModel
from cluster.plan.inventory import Node, load_nodes, nodes_of_ray
from cluster.plan.plan import Plan, make_plan
from cluster.plan.sizing import ModelSize
from engine.contract.errors import ConfigError
from engine.device.memory import GPU_CONTEXT_BYTES
from tests.support.cluster.served_checkpoint import make_served_checkpoint

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    path = tmp_path_factory.mktemp("plan") / "model"
    return ServedModel(path=make_served_checkpoint(path), name="tiny")


def gpu_node(address: str, **resources: float) -> Node:
    return Node(
        address=address,
        num_cores=16,
        num_cpus=16.0,
        memory_bytes=64 * GIB,
        num_gpus=1.0,
        gpu_memory_bytes=24 * GIB,
        resources=resources,
    )


def plan_of(model: ServedModel, nodes: list[Node], **config: Any) -> Plan:
    return make_plan(BatonConfig.model_validate(config), model, nodes)


def test_parameters_are_those_that_torch_counts(model: ServedModel) -> None:
    from tests.support.engine.checkpoints import load_oracle

    oracle = load_oracle(model.path)

    assert ModelSize.of(model.path).num_parameters == sum(item.numel() for item in oracle.parameters())


def test_gpu_memory_less_weights_and_context_is_kv_cache(model: ServedModel) -> None:
    made = plan_of(model, [gpu_node("a"), gpu_node("b")], device="cuda", dtype="bfloat16", max_model_len=1024)
    size = made.sizes["decode"]

    assert not made.problems
    assert size.dtype == "bfloat16"
    assert size.weight_bytes == 2 * made.model.num_parameters
    assert size.budget is not None
    room = int(24 * GIB * 0.9) - size.weight_bytes - GPU_CONTEXT_BYTES - size.budget.num_bytes
    assert 0 < room < GIB, "what is left is a step's activations"
    assert size.num_blocks == min(
        size.budget.num_bytes // size.demand.layout.block_bytes, size.demand.max_useful_blocks
    )


def test_draft_model_and_its_cache_take_memory_of_those_alone_that_generate(model: ServedModel) -> None:
    def sizes(**speculative: Any) -> Plan:
        nodes = [gpu_node("a"), gpu_node("b")]
        return plan_of(
            model, nodes, device="cuda", dtype="bfloat16", max_model_len=1024, speculative=speculative, roles="fixed"
        )

    plain = sizes().sizes
    drafted = sizes(method="draft_model", draft_model=model.path, draft_cache_tokens=4096).sizes

    decode, layout = drafted["decode"], drafted["decode"].demand.layout
    assert decode.draft_bytes == decode.weight_bytes + 4096 // layout.block_size * layout.block_bytes
    assert plain["decode"].budget is not None
    assert decode.budget is not None
    assert plain["decode"].budget.num_bytes - decode.budget.num_bytes == decode.draft_bytes
    assert drafted["prefill"] == plain["prefill"]


def test_unknown_gpu_memory_leaves_the_cache_open(model: ServedModel) -> None:
    nodes = [Node(address=name, num_cores=8, num_cpus=8, memory_bytes=GIB, num_gpus=1) for name in ("a", "b")]

    made = plan_of(model, nodes, device="cuda", dtype="bfloat16")

    assert made.sizes["decode"].num_blocks is None
    assert not made.problems


def test_a_cache_too_small_for_one_request_is_a_problem_with_the_arithmetic(model: ServedModel) -> None:
    made = plan_of(model, [gpu_node("a"), gpu_node("b")], device="cpu", cache={"num_blocks": 4})

    assert [problem.partition(":")[0] for problem in made.problems] == ["prefill", "decode"]
    assert "num_blocks = 4" in made.problems[0]


def test_precision_that_no_gpu_computes_in_is_a_problem(model: ServedModel) -> None:
    problems = plan_of(model, [gpu_node("a"), gpu_node("b")], device="cuda", dtype="float32").problems

    assert [problem.partition(":")[0] for problem in problems] == ["prefill", "decode"]
    assert "float32" in problems[0]


def test_auto_is_16_bits_on_gpus_where_the_checkpoint_is_float32(model: ServedModel) -> None:
    made = plan_of(model, [gpu_node("a"), gpu_node("b")], device="cuda", max_model_len=1024)

    assert not made.problems
    assert {size.dtype for size in made.sizes.values()} == {"bfloat16"}
    assert made.sizes["decode"].weight_bytes == 2 * made.model.num_parameters


def test_two_workers_on_one_host_share_its_memory(model: ServedModel) -> None:
    alone = plan_of(model, [gpu_node("a"), gpu_node("b")], device="cpu", max_model_len=1024)
    config = {"device": "cpu", "max_model_len": 1024, "decode_replicas": 3}
    small = Node(address="a", num_cores=2, num_cpus=2, memory_bytes=2 * GIB)

    shared = plan_of(model, [small], **config)

    assert alone.sizes["decode"].num_blocks is not None
    assert shared.sizes["decode"].budget is not None
    assert shared.sizes["decode"].budget.num_bytes <= int(0.5 * GIB * 0.4)


def tier(num_gib: float) -> dict[str, Any]:
    return {"connector": "chain", "chain": ["host", "nixl"], "host_bytes": int(num_gib * GIB)}


def test_host_tier_is_counted_in_the_memory_of_its_machine(model: ServedModel) -> None:
    """The memory that the tier takes is not available for the KV cache."""
    small = Node(address="a", num_cores=2, num_cpus=2, memory_bytes=4 * GIB)

    without = plan_of(model, [small], device="cpu", max_model_len=1024)
    made = plan_of(model, [small], device="cpu", max_model_len=1024, kv_transfer=tier(1))

    assert not made.problems
    assert (without.sizes["decode"].host_bytes, made.sizes["decode"].host_bytes) == (0, GIB)
    budget, before = made.sizes["decode"].budget, without.sizes["decode"].budget
    assert budget is not None
    assert before is not None
    assert budget.num_bytes == pytest.approx(before.num_bytes - 0.4 * GIB, abs=2)


def test_tiers_are_part_of_the_plan(model: ServedModel, tmp_path: Path) -> None:
    """Each with its blocks; in main memory the disk tier takes its buffer alone."""
    machine = Node(address="a", num_cores=2, num_cpus=2, memory_bytes=4 * GIB)
    tiers = {
        "connector": "chain",
        "chain": ["host", "disk", "nixl"],
        "host_bytes": GIB,
        "disk_bytes": 100 * GIB,
        "disk_path": str(tmp_path),
    }
    config = BatonConfig.model_validate({"device": "cpu", "max_model_len": 1024, "kv_transfer": tiers})

    made = make_plan(config, model, [machine])

    assert not made.problems
    assert made.sizes["decode"].host_bytes == GIB + 64 * MIB
    lines = [line.strip() for line in report(config, model, made)]
    block_bytes = made.sizes["decode"].demand.layout.block_bytes
    assert lines.count(f"evicted blocks: 1.00 GiB of main memory = {GIB // block_bytes:,} blocks") == 2
    assert lines.count(f"evicted blocks: 100.00 GiB of disk space = {100 * GIB // block_bytes:,} blocks") == 2


def test_latents_are_counted_as_what_is_cached(tmp_path: Path) -> None:
    path = make_served_checkpoint(tmp_path / "model", "deepseek_v2_lite")
    served = ServedModel(path=path, name="latents")
    config = BatonConfig.model_validate({"device": "cpu", "max_model_len": 512})

    made = make_plan(config, served, [Node(address="a", num_cores=2, num_cpus=2, memory_bytes=4 * GIB)])

    assert not made.problems
    lines = [line.strip() for line in report(config, served, made)]
    assert lines.count("KV block: 16 tokens x 3 layers x latents of 48 x 4 bytes = 9.0 KiB") == 2


def test_host_tiers_larger_than_their_machine_are_a_problem_with_the_remedy(model: ServedModel) -> None:
    """Prefill and decode have one each, of 3 GiB, on a machine of 4 GiB."""
    small = Node(address="a", num_cores=2, num_cpus=2, memory_bytes=4 * GIB)

    problems = plan_of(model, [small], device="cpu", max_model_len=1024, kv_transfer=tier(3)).problems

    assert [problem.partition(":")[0] for problem in problems] == ["prefill", "decode"]
    for problem in problems:
        assert "host_bytes" in problem
        assert "3072.0 MiB" in problem
        assert "2048.0 MiB" in problem
        assert "lower kv_transfer.host_bytes to " in problem
    lower = int(problems[0].partition("lower kv_transfer.host_bytes to ")[2].split()[0].rstrip(","))
    mended = plan_of(model, [small], device="cpu", max_model_len=1024, kv_transfer={**tier(1), "host_bytes": lower})
    assert not mended.problems


def test_host_tier_of_gpu_workers_needs_main_memory_too(model: ServedModel) -> None:
    nodes = [gpu_node("a"), gpu_node("b")]
    config = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 1024}

    fits = plan_of(model, nodes, **config, kv_transfer=tier(40))
    problems = plan_of(model, nodes, **config, kv_transfer=tier(65)).problems

    assert not fits.problems
    assert [problem.partition(":")[0] for problem in problems] == ["prefill", "decode"]
    assert "66560.0 MiB" in problems[0]
    assert "65536.0 MiB" in problems[0]


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_gpus_that_are_asked_for_where_no_machine_has_one_are_refused(model: ServedModel, pool: str) -> None:
    """Not ignored: with `device: auto` the engine would compute on the CPU."""
    nodes = [Node(address="a", num_cores=8, num_cpus=8, memory_bytes=16 * GIB)]

    with pytest.raises(
        ConfigError, match=rf"{pool}\.num_gpus is 0\.5, but no machine has a GPU.*leave {pool}\.num_gpus out"
    ):
        plan_of(model, nodes, **{pool: {"num_gpus": 0.5}})


def test_gpus_that_are_asked_for_are_booked_where_there_are_some(model: ServedModel) -> None:
    made = plan_of(model, [gpu_node("a"), gpu_node("b")], dtype="bfloat16", decode={"num_gpus": 0.5})

    assert made.placement.shares["decode"].num_gpus == 0.5


def test_what_no_machine_offers_is_named_with_the_remedy(model: ServedModel) -> None:
    nodes = [gpu_node("a"), gpu_node("b")]

    (problem,) = plan_of(
        model, nodes, device="cuda", dtype="bfloat16", decode={"resources": {"baton_decode": 0.001}}
    ).problems

    assert "decode replica 1 fits on no machine" in problem
    assert "no machine offers 0.001 baton_decode" in problem
    assert "--resources='{\"baton_decode\": 1}'" in problem


def test_too_many_workers_are_counted_against_what_there_is(model: ServedModel) -> None:
    (problem,) = plan_of(
        model, [gpu_node("a"), gpu_node("b")], device="cuda", dtype="bfloat16", decode_replicas=2
    ).problems

    assert "decode replica 2 fits on no machine: it takes 0.1 CPU, 1 GPU" in problem
    assert "the 2 machines together offer 32 CPU, 2 GPU" in problem
    assert "lower decode_replicas" in problem


def test_worker_too_many_for_its_machines_is_told_of_the_limit(model: ServedModel) -> None:
    nodes = [Node(address=name, num_cores=8, num_cpus=8, memory_bytes=16 * GIB) for name in ("a", "b")]

    (problem,) = plan_of(model, nodes, device="cpu", decode_replicas=3, decode={"max_per_node": 1}).problems

    assert "2 machines offer that, and each may have 1 at most" in problem
    assert "raise decode.max_per_node" in problem


def test_nodes_of_a_running_ray() -> None:
    alive = {
        "Alive": True,
        "NodeManagerAddress": "10.0.0.2",
        "Resources": {
            "CPU": 8.0,
            "GPU": 2.0,
            "memory": 100.0,
            "object_store_memory": 7.0,
            "node:10.0.0.2": 1.0,
            "accelerator_type:H100": 1.0,
            "baton_decode": 1.0,
        },
    }

    (node,) = nodes_of_ray([alive, {**alive, "Alive": False, "NodeManagerAddress": "10.0.0.3"}])

    assert (node.address, node.num_cores, node.num_gpus) == ("10.0.0.2", 8, 2.0)
    assert node.gpu_memory_bytes == 79 * GIB
    assert node.resources == {"baton_decode": 1.0}


def test_nodes_file_repeats_machines_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes: [{name: a, count: 2, cpus: 4, memory_gib: 8}, {cpus: 1, memory_gib: 1}]")

    assert [node.address for node in load_nodes(file)] == ["a-1", "a-2", "machine 2"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "nodes is missing"),
        ("node: [{cpus: 4, memory_gib: 8}]", "unknown key 'node'; did you mean 'nodes'?"),
        ("1: 2", "unknown key 1; known keys: nodes"),
        ("nodes: []", "nodes: it must not be empty"),
        ("nodes: {cpus: 4}", "nodes: it must be a list"),
        ("nodes: [4]", "nodes.0: it must be a mapping of keys to values, got 4"),
        ("nodes: [{cpus: 4}]", "nodes.0.memory_gib is missing"),
        ("nodes: [{cpus: 4, memory_gib: 8, gpu: 1}]", "unknown key 'nodes.0.gpu'; did you mean 'nodes.0.gpus'?"),
        ("nodes: [{cpus: 4, memory_gib: .inf}]", "nodes.0.memory_gib"),
        ("nodes: [{cpus: 4, memory_gib: 1.0e300}]", "nodes.0.memory_gib"),
        ("nodes: [{cpus: 4, memory_gib: 8, gpus: 1, gpu_memory_gib: .inf}]", "nodes.0.gpu_memory_gib"),
        ("nodes: [{cpus: 4, memory_gib: 8, gpus: 1000000000000}]", "nodes.0.gpus"),
        ("nodes: [{cpus: 4, memory_gib: 8, resources: {fast: -1}}]", "fast is -1"),
        ("nodes: [{cpus: 4, memory_gib: 8, resources: {fast: .nan}}]", "fast: it must be a finite number, got nan"),
        ("nodes: [{cpus: 4, memory_gib: 8, resources: {GPU: 2}}]", "GPU is not a custom resource: use gpus"),
    ],
)
def test_what_no_machine_can_be_is_named(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(text)

    with pytest.raises(ConfigFileError) as refused:
        load_nodes(file)

    assert problem in str(refused.value)


def test_nodes_file_that_is_missing_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"cannot read the nodes file .*none\.yaml: No such file"):
        load_nodes(tmp_path / "none.yaml")


def cpu_node(address: str) -> Node:
    return Node(address=address, num_cores=4, num_cpus=4.0, memory_bytes=16 * GIB)


def test_workers_on_several_machines_need_a_network_of_their_own(model: ServedModel) -> None:
    made = plan_of(model, [cpu_node("a"), cpu_node("b")], address="auto", device="cpu")

    (warning,) = made.warnings
    assert f"warning: {warning}" in report(BatonConfig(device="cpu"), model, made)
    assert "KV moves between 2 machines over ports of UCX, which have no authentication" in warning
    assert "docs/security.md" in warning


def test_ports_on_one_machine_are_told_with_the_remedy(model: ServedModel) -> None:
    made = plan_of(model, [cpu_node("a")], address="auto", device="cpu")

    (warning,) = made.warnings
    assert "set kv_transfer.transport to local" in warning


@pytest.mark.parametrize("address", [None, "auto"])
def test_without_ports_there_is_nothing_to_warn_of(model: ServedModel, address: str | None) -> None:
    made = plan_of(model, [cpu_node("a")], address=address, device="cpu", kv_transfer={"transport": "local"})

    assert made.warnings == ()
    assert made.problems == ()


def test_local_transport_over_two_machines_is_refused_with_the_remedy(model: ServedModel) -> None:
    made = plan_of(
        model, [cpu_node("a"), cpu_node("b")], address="auto", device="cpu", kv_transfer={"transport": "local"}
    )

    (problem,) = made.problems
    assert "kv_transfer.transport is local, but workers would run on 2 machines (a, b): set it to network" in problem


def test_plan_warns_of_a_pool_that_cannot_grow_and_can_be_carried_out(model: ServedModel) -> None:
    made = plan_of(model, [gpu_node("a"), gpu_node("b")], dtype="bfloat16", decode={"scaling": {"max_replicas": 4}})
    lines = list(report(BatonConfig.model_validate({"decode": {"scaling": {"max_replicas": 4}}}), model, made))

    assert not made.problems
    assert [line for line in lines if line.startswith("warning: decode.scaling.max_replicas is 4, but beside")]


def test_worker_of_a_pool_that_may_grow_has_its_part_of_the_memory_of_a_gpu(model: ServedModel) -> None:
    """Whoever does not scale has what he had: half."""
    keys: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "scheduler": {"max_num_seqs": 1024}}

    def budget(**decode: Any) -> int:
        made = plan_of(model, [gpu_node("a")], **keys, decode=decode)
        assert not made.problems
        found = made.sizes["decode"].budget
        assert found is not None
        return found.num_bytes

    parts = [budget(), budget(scaling={"max_replicas": 4}), budget(num_gpus=0.5, scaling={"max_replicas": 4})]

    shares = [0.5, 0.2, 0.5]
    assert [part - parts[0] for part in parts] == pytest.approx(
        [24 * GIB * 0.9 * (share - 0.5) for share in shares], abs=MIB
    )
