"""The remedies in a plan: each names existing keys, and following it helps."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from typing import Any

import pytest
import yaml

from cluster.config.config import BatonConfig
from cluster.config.config_file import nested_keys
from cluster.config.served_model import served_model
from cluster.plan.inventory import Node
from cluster.plan.plan import Plan, make_plan

GIB = 1 << 30
MIB = 1 << 20
MODEL = served_model(BatonConfig())
KEYS = {*nested_keys(BatonConfig), "prefill.max_per_node", "decode.max_per_node"}


def hosts(count: int, *, cpus: int = 16, gib: float = 64, gpus: int = 0, gpu_gib: float = 24, **custom: float) -> Any:
    return [
        Node(
            address=f"{'g' if gpus else 'c'}{number}",
            num_cores=cpus,
            num_cpus=float(cpus),
            memory_bytes=int(gib * GIB),
            num_gpus=float(gpus),
            gpu_memory_bytes=int(gpu_gib * GIB) if gpus else None,
            resources=custom,
        )
        for number in range(count)
    ]


GPU = {"device": "cuda", "dtype": "bfloat16"}

SEVERAL = "several things"
CASES: dict[str, tuple[list[Node], str]] = {
    "too many for their GPUs": (hosts(2, gpus=1), "device: cuda\ndtype: bfloat16\ndecode_replicas: 3"),
    "the other pool took all GPUs": (hosts(2, gpus=1), "device: cuda\ndtype: bfloat16\nprefill_replicas: 2"),
    "scaling begins too high": (
        hosts(3, gpus=1),
        "device: cuda\ndtype: bfloat16\ndecode: {scaling: {min_replicas: 4, max_replicas: 8}}",
    ),
    "scaling begins too high, and so do replicas": (
        hosts(3, gpus=1),
        "device: cuda\ndtype: bfloat16\ndecode_replicas: 6\ndecode: {scaling: {min_replicas: 4, max_replicas: 8}}",
    ),
    "scaling begins where replicas say": (
        hosts(3, gpus=1),
        "device: cuda\ndtype: bfloat16\ndecode_replicas: 6\ndecode: {scaling: {min_replicas: 1, max_replicas: 8}}",
    ),
    "too many for each machine": (hosts(2), "decode_replicas: 5\ndecode: {max_per_node: 1}"),
    "router beside workers that reserve all": (
        hosts(2, cpus=4),
        "router_per_node: true\nprefill: {num_cpus: 4}\ndecode: {num_cpus: 4}",
    ),
    "router where one pool reserves all": (hosts(1, cpus=4), "decode: {num_cpus: 3.9}"),
    "too many routers": (hosts(1, cpus=1), "router_replicas: 12"),
    "more CPUs than any machine has": (hosts(2, cpus=4), "decode_replicas: 3\ndecode: {num_cpus: 16}"),
    "CPUs for one less": (hosts(2, cpus=8), "decode_replicas: 3\ndecode: {num_cpus: 8}"),
    "more GPUs than any machine has": (hosts(2, gpus=1), "device: cuda\ndtype: bfloat16\ndecode: {num_gpus: 2}"),
    "parts of GPUs that do not add up": (
        hosts(1, gpus=2),
        "device: cuda\ndtype: bfloat16\ndecode_replicas: 2\nprefill: {num_gpus: 0.6}\ndecode: {num_gpus: 0.6}",
    ),
    "all of a custom resource": (hosts(2, fast=1), "decode_replicas: 3\ndecode: {resources: {fast: 1}}"),
    "more of it than there is": (hosts(2, fast=1), "decode: {resources: {fast: 2}}"),
    "name with a slip": (hosts(2, baton_decode=1), "decode: {resources: {baton_decoder: 0.001}}"),
    "blocks for both": (hosts(2), "cache: {num_blocks: 4}"),
    "blocks for one": (hosts(2), "decode: {cache: {num_blocks: 4}}"),
    "blocks for both, and others for one": (hosts(2), "cache: {num_blocks: 4096}\ndecode: {cache: {num_blocks: 4}}"),
    "bytes for both": (hosts(2), "cache: {kv_cache_bytes: 100000}"),
    "bytes for one": (hosts(2), "prefill: {cache: {kv_cache_bytes: 100000}}"),
    "fewer blocks than requests": (hosts(2), "scheduler: {max_num_seqs: 1024}\ncache: {num_blocks: 512}"),
    "fewer blocks than requests of one": (
        hosts(2),
        "decode: {scheduler: {max_num_seqs: 1024}, cache: {num_blocks: 512}}",
    ),
    "little memory": (hosts(1, gib=0.05), "prefill_replicas: 1"),
    "little memory for many": (hosts(1, gib=0.12), "decode_replicas: 4"),
    "GPU with little memory": (hosts(2, gpus=1, gpu_gib=0.68), "device: cuda\ndtype: bfloat16"),
    "GPU memory mostly kept": (
        hosts(2, gpus=1, gpu_gib=24),
        "device: cuda\ndtype: bfloat16\ncache: {gpu_memory_utilization: 0.025}",
    ),
    "shared GPU": (hosts(1, gpus=1, gpu_gib=2), "device: cuda\ndtype: bfloat16\ndecode_replicas: 2"),
    "shared GPU of a pool that may grow": (
        hosts(1, gpus=1, gpu_gib=8),
        "device: cuda\ndtype: bfloat16\ndecode: {scaling: {max_replicas: 12}}",
    ),
    "shared GPU of pools that may grow": (
        hosts(1, gpus=1, gpu_gib=8),
        "device: cuda\ndtype: bfloat16\nprefill: {scaling: {max_replicas: 8}}\n"
        "decode: {scaling: {min_replicas: 2, max_replicas: 40}}",
    ),
    "float32 on GPUs": (
        hosts(2, gpus=1),
        "device: cuda\ndtype: float32\nprefill: {num_gpus: 1}\ndecode: {num_gpus: 1}",
    ),
    "block larger than a step": (hosts(2), "cache: {block_size: 4096}"),
    "prompts that are not split": (
        hosts(2),
        "scheduler: {enable_chunked_prefill: false, max_num_batched_tokens: 256}",
    ),
    "prompts of one pool that are not split": (
        hosts(2),
        "prefill: {scheduler: {enable_chunked_prefill: false, max_num_batched_tokens: 256}}",
    ),
    "dozens too many": (
        hosts(6, gpus=4),
        "device: cuda\ndtype: bfloat16\nprefill_replicas: 40\ndecode_replicas: 12",
    ),
    "dozens too many for each machine": (hosts(4), "decode_replicas: 80\ndecode: {max_per_node: 3}"),
    SEVERAL: (
        hosts(2, gpus=1),
        "device: cuda\ndtype: float32\ndecode_replicas: 3\ncache: {num_blocks: 4}\nrouter_replicas: 400",
    ),
}


def plan_of(nodes: list[Node], values: dict[str, Any]) -> Plan:
    return make_plan(BatonConfig.model_validate(values), MODEL, nodes)


def changes_in(problem: str) -> list[list[tuple[str, Any]]]:
    """The changes that the last part of a problem proposes: alternatives of keys and values."""
    alternatives = [part for part in problem.rpartition("; ")[2].split(", or ") if re.match("lower|raise|set", part)]
    return [[read_change(step) for step in alternative.split(" and ")] for alternative in alternatives]


def read_change(step: str) -> tuple[str, Any]:
    read = re.fullmatch(r"(?:lower|raise|set) (\S+) to (.+)", step)
    assert read is not None, step
    return read[1], json.loads(read[2])


def followed(values: dict[str, Any], changes: list[tuple[str, Any]]) -> dict[str, Any]:
    """The configuration with these changes, made by someone who reads only the remedy."""
    content = copy.deepcopy(values)
    for key, value in changes:
        *sections, last = key.split(".")
        section = content
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return content


@pytest.mark.parametrize("case", [case for case in CASES if case != SEVERAL])
def test_every_remedy_names_known_keys_and_mends_what_it_is_for(case: str) -> None:
    nodes, text = CASES[case]
    values = yaml.safe_load(text)
    before = plan_of(nodes, values).problems

    assert before
    for problem in before:
        alternatives = changes_in(problem)
        assert alternatives, problem
        for changes in alternatives:
            assert all(key in KEYS or re.match(r"(prefill|decode)\.resources", key) for key, _ in changes), problem
            after = plan_of(nodes, followed(values, changes)).problems
            assert len(after) < len(before), (problem, changes, after)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("which", [0, -1])
def test_plan_fits_when_its_remedies_are_followed_one_after_the_other(case: str, which: int) -> None:
    nodes, text = CASES[case]
    values = yaml.safe_load(text)

    for _ in range(8):
        problems = plan_of(nodes, values).problems
        if not problems:
            break
        values = followed(values, changes_in(problems[0])[which])

    assert not problems


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("scaling begins too high", "decode.scaling.min_replicas"),
        ("scaling begins where replicas say", "decode_replicas"),
        ("the other pool took all GPUs", "prefill_replicas"),
        ("router beside workers that reserve all", "prefill.num_cpus"),
        ("too many routers", "router_replicas"),
        ("dozens too many", "prefill_replicas"),
        ("blocks for both", "cache.num_blocks"),
        ("blocks for one", "decode.cache.num_blocks"),
        ("blocks for both, and others for one", "decode.cache.num_blocks"),
        ("fewer blocks than requests of one", "decode.scheduler.max_num_seqs"),
        ("name with a slip", "decode.resources"),
        ("shared GPU of a pool that may grow", "decode.scaling.max_replicas"),
        ("shared GPU of a pool that may grow", "decode.num_gpus"),
        ("block larger than a step", "cache.block_size"),
    ],
)
def test_key_is_the_one_that_decides(case: str, key: str) -> None:
    nodes, text = CASES[case]

    problem = plan_of(nodes, yaml.safe_load(text)).problems[0]

    assert key in [named for changes in changes_in(problem) for named, _ in changes]
    assert not re.search(r"(?<!\w)router\.max_per_node", problem)


def test_change_is_no_larger_than_it_needs_to_be() -> None:
    nodes, text = CASES["dozens too many for each machine"]

    (problem,) = plan_of(nodes, yaml.safe_load(text)).problems

    assert changes_in(problem) == [[("decode_replicas", 12)], [("decode.max_per_node", 20)]]


def test_resource_that_no_machine_offers_is_enough_for_all_workers_where_it_is_added() -> None:
    values = {"decode_replicas": 3, "decode": {"resources": {"special": 0.5}}}
    nodes = hosts(2)

    (problem,) = plan_of(nodes, values).problems

    offered = re.search(r"start Ray on the machines meant for it with --resources='(.*)'$", problem)
    assert offered is not None, problem
    nodes[0] = dataclasses.replace(nodes[0], resources=json.loads(offered[1]))
    assert not plan_of(nodes, values).problems


def test_machines_that_have_it_apart_are_told_apart_from_too_few() -> None:
    nodes = [*hosts(1, gpus=2), *hosts(1, fast=1)]

    (problem,) = plan_of(nodes, {**GPU, "decode": {"resources": {"fast": 0.001}}}).problems

    assert "no machine offers all of that at once" in problem
    assert problem.endswith("""start Ray on the machines meant for it with --resources='{"fast": 1}'""")


@pytest.mark.parametrize("case", ["too many for their GPUs", "too many for each machine", "CPUs for one less"])
def test_added_machines_help_where_they_are_asked_for(case: str) -> None:
    nodes, text = CASES[case]
    values = yaml.safe_load(text)

    (problem,) = plan_of(nodes, values).problems

    assert problem.endswith(", or add machines")
    assert not plan_of([*nodes, *nodes, *(dataclasses.replace(node, address="x") for node in nodes)], values).problems


@pytest.mark.parametrize("case", ["little memory", "GPU with little memory"])
def test_more_memory_helps_where_it_is_asked_for(case: str) -> None:
    nodes, text = CASES[case]
    values = yaml.safe_load(text)

    for problem in plan_of(nodes, values).problems:
        assert problem.endswith("with more memory")

    more = [
        dataclasses.replace(
            node, memory_bytes=64 * GIB, gpu_memory_bytes=64 * GIB if node.gpu_memory_bytes is not None else None
        )
        for node in nodes
    ]
    assert not plan_of(more, values).problems


def test_more_memory_is_not_asked_for_where_it_would_not_help() -> None:
    for case in ("blocks for both", "float32 on GPUs", "block larger than a step"):
        nodes, text = CASES[case]
        assert not any("more memory" in problem for problem in plan_of(nodes, yaml.safe_load(text)).problems)
