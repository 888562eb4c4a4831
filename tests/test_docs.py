"""What the pages name exists: files, commands and their options, make targets, keys and their defaults, metrics."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from cluster.chaos.scenario import parse_scenario
from cluster.cli import app
from cluster.commands.welcome import welcome
from cluster.config.config import BatonConfig
from cluster.config.config_file import nested_keys, section_type
from cluster.config.served_model import served_model
from engine.contract.messages import SamplingParams
from engine.contract.request_fields import request_fields
from engine.contract.stats import WORKER_COUNTERS
from kv_transfer.registry import TIERS
from router.policies import policy_names
from router.report.counters import ROUTER_COUNTERS
from router.report.metric_rows import MetricFamily
from router.report.metrics import RouterMetrics
from router.report.worker_metrics import worker_families
from router.roles import ROLES
from scripts.figures_page import page as figures_page

ROOT = Path(__file__).parents[1]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in sorted(
        [
            *ROOT.glob("*.md"),
            *ROOT.glob("docs/*.md"),
            *ROOT.glob("scripts/*/README.md"),
            ROOT / "benchmarks" / "README.md",
        ]
    )
    if page.name != "CHANGELOG.md"  # tells of what was
}
ROOMS = (
    "engine",
    "kv_transfer",
    "prefill",
    "decode",
    "router",
    "simulation",
    "cluster",
    "deploy",
    "tests",
    "benchmarks",
    "scripts",
)
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMAND_ENDS = re.compile(r"&&|\|\|?|[;'>]")

every_page = pytest.mark.parametrize("page", PAGES)


def code_of(text: str) -> Iterator[str]:
    """Each piece of code between backticks, and each line of a shell block with what continues it."""
    for language, block in FENCED.findall(text):
        if language == "sh":
            yield from block.replace("\\\n", " ").splitlines()
    for match in re.finditer(r"`([^`]+)`", FENCED.sub("", text)):
        yield " ".join(match[1].split())


def commands_of(text: str, program: str) -> Iterator[list[str]]:
    """The words behind a program's name, wherever it is called."""
    for code in code_of(text):
        for command in COMMAND_ENDS.split(code.partition("  #")[0]):
            words = command.removeprefix("$ ").replace('"', " ").split()
            if words[:1] == [program]:
                yield words[1:]


@every_page
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if not link.startswith("https://"):
            assert ((ROOT / page).parent / link.partition("#")[0]).exists(), link


def test_every_page_is_reached_from_the_first() -> None:
    reached, new = set[str](), {"README.md"}
    while new:
        reached |= new
        links = {link for page in new for link in re.findall(r"(?:docs/)?([\w-]+\.md)", PAGES[page])}
        new = {page for page in PAGES if Path(page).name in links} - reached

    assert {page for page in PAGES if page.startswith("docs/")} <= reached


@every_page
def test_files_that_are_named_are_there(page: str) -> None:
    for code in code_of(PAGES[page]):
        if re.fullmatch(rf"(?:{'|'.join(ROOMS)}|docs|\.ci)/[\w./-]*", code):
            assert (ROOT / code).exists(), code


@every_page
def test_commands_exist_with_their_options(page: str) -> None:
    group: Any = typer.main.get_command(app)
    for words in commands_of(PAGES[page], "baton"):
        command = group
        while words and not words[0].startswith("-") and hasattr(command, "commands"):
            assert words[0] in command.commands, f"there is no command baton {words[0]}"
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        used = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert used <= known, f"baton {command.name} takes no {used - known}"


@every_page
def test_make_targets_and_modules_exist(page: str) -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for code in code_of(PAGES[page]):
        words = shlex.split(code, comments=True) if code.startswith("make ") else []
        asked = {word for word in words[1:] if "=" not in word}
        assert asked <= set(targets.split()), code
    for module in re.findall(r"python -m ((?:benchmarks|scripts|tests)[\w.]*)", PAGES[page]):
        path = ROOT / module.rstrip(".").replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@every_page
def test_keys_exist_and_have_the_defaults_that_the_page_says(page: str) -> None:
    for key in keys_of(PAGES[page]):
        assert key in DEFAULTS, f"there is no key {key}"
    by_last = {key.rpartition(".")[2]: value for key, value in DEFAULTS.items() if not key.startswith(tuple(ROLES))}
    for key, number in re.findall(r"`([a-z_.]+)`\s\((\d+)(?:\ss)?[,;)]", PAGES[page]):
        assert DEFAULTS.get(key, by_last.get(key)) == int(number), key
    for key, default in re.findall(r"^\| `(\w+\.\w+)` \| .* \| `(\w+)` \|$", PAGES[page], re.MULTILINE):
        assert DEFAULTS[key] == default, key


def keys_of(text: str) -> Iterator[str]:
    """The keys of the configuration that a page names with their section, and those of its samples."""
    for code in code_of(text):
        key = code.partition(":")[0]
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and key.partition(".")[0] in BatonConfig.model_fields:
            yield key
    for language, block in FENCED.findall(text):
        content = yaml.safe_load(block) if language == "yaml" else None
        if content and content.keys() <= BatonConfig.model_fields.keys():
            yield from written_keys(content)


def written_keys(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """All keys of a sample, with their sections."""
    for name, value in content.items():
        key = f"{prefix}{name}"
        yield key
        if isinstance(value, dict) and key.rpartition(".")[2] != "resources":
            yield from written_keys(value, f"{key}.")


def defaults() -> dict[str, object]:
    """Every key and section of the configuration, with the default of those that have one."""
    found: dict[str, object] = {}
    for key in nested_keys(BatonConfig):
        *sections, name = key.split(".")
        model: Any = BatonConfig
        for number, section in enumerate(sections):
            model = section_type(model.model_fields[section].annotation)
            found[".".join(sections[: number + 1])] = None
        found[key] = model.model_fields[name].get_default(call_default_factory=True)
    return found


DEFAULTS = defaults()


def test_every_benchmark_and_every_module_of_the_training_is_listed() -> None:
    benchmarks = [file.stem for file in (ROOT / "benchmarks").glob("*.py") if "__main__" in file.read_text()]
    modules = [file.stem for file in (ROOT / "scripts" / "train_tiny").glob("*.py") if not file.stem.startswith("_")]

    assert [name for name in benchmarks if f"`python -m benchmarks.{name}`" not in PAGES["benchmarks/README.md"]] == []
    assert [name for name in modules if f"`{name}`" not in PAGES["scripts/train_tiny/README.md"]] == []


def test_every_endpoint_is_explained() -> None:
    routes = [
        route
        for file in (ROOT / "router" / "api").glob("*.py")
        for route in re.findall(r'@app\.(get|post)\("(/[^"]*)"', file.read_text())
    ]
    explained = set(re.findall(r"`(GET|POST) (/[^`]*)`", PAGES["docs/parameters.md"]))

    assert len(routes) > 10
    assert {(method.upper(), path.replace("{model:path}", "NAME")) for method, path in routes} <= explained


def test_first_request_of_the_readme_is_the_one_that_the_command_prints() -> None:
    printed = welcome(BatonConfig(), served_model(BatonConfig()), logs="").splitlines()[-1]
    written = next(code for code in code_of(PAGES["README.md"]) if code.startswith("curl "))

    assert shlex.split(written) == shlex.split(printed)


def test_sample_of_a_scenario_can_be_run() -> None:
    samples = [
        yaml.safe_load(block) for language, block in FENCED.findall(PAGES["docs/faults.md"]) if language == "yaml"
    ]
    (scenario,) = [sample for sample in samples if "steps" in sample]

    parse_scenario(scenario, where="docs/faults.md")


def test_page_of_faults_names_every_scenario_and_no_other() -> None:
    rows = re.findall(r"^(?:\| [^|]+ ){4}\| ([^|]*)\|$", PAGES["docs/faults.md"], re.MULTILINE)
    named = {name for cell in rows for name in re.findall(r"`([a-z-]+)`", cell)}

    assert named == {file.stem for file in (ROOT / "deploy" / "chaos").glob("*.yaml")}


def test_what_the_page_of_faults_says_to_look_at_is_in_the_status() -> None:
    known = set(re.findall(r'"(\w+)": ', (ROOT / "router" / "report" / "status.py").read_text()))
    known |= {told.total for told in (*WORKER_COUNTERS.values(), *ROUTER_COUNTERS.values()) if told.total}
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| [^|]+ \| (`[^|]+`) \|", PAGES["docs/faults.md"], re.MULTILINE)
    named = {name for cell in rows for name in re.findall(r"`(\w+)`", cell)}

    assert len(named) > 5
    assert named <= known


def served_metrics() -> set[str]:
    """The names of everything that /metrics has under a name of its own."""
    metrics = RouterMetrics()
    metrics.watch(in_progress=lambda: 0, waiting=lambda: 0)
    of_all = {"baton:router_up", "baton:replicas_wanted"}
    return {name_of(family) for family in (*metrics.families(), *worker_families(()))} | of_all


def name_of(family: MetricFamily) -> str:
    return f"{family.name}_total" if family.kind == "counter" else family.name


def test_every_metric_is_explained() -> None:
    explained = set(re.findall(r"baton:\w+", PAGES["docs/metrics.md"]))

    assert served_metrics() <= explained


@every_page
def test_metrics_that_are_named_are_served(page: str) -> None:
    named = {name for name in re.findall(r"baton:[a-z]\w*", PAGES[page]) if not name.startswith("baton:worker_")}

    assert named <= served_metrics()


def test_every_policy_is_explained() -> None:
    explained = {name for line in PAGES["docs/routing.md"].splitlines() for name in re.findall(r"`(\w+)`", line[:40])}

    missing = set(policy_names()) - explained
    assert not missing, "docs/routing.md needs a row for each policy"


def test_every_parameter_of_logits_processors_is_explained() -> None:
    missing = request_fields(SamplingParams).keys() - set(re.findall(r"\w+", PAGES["docs/parameters.md"]))

    assert not missing, "say in docs/parameters.md what they do, and where in the order they come"


def test_import_contracts_name_every_room() -> None:
    """A room that no contract names could import whatever it likes."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {each["containers"][0]: " ".join(each["layers"]) for each in contracts if "containers" in each}

    for package in ("engine", "router", "cluster", "kv_transfer"):
        rooms = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
        missing = rooms - set(layers[package].replace("|", " ").split())
        assert not missing, f"name them in the layers of {package} in pyproject.toml"


def test_every_tier_lies_where_engine_and_router_must_not_look() -> None:
    """They know tiers by their Protocols only; the contracts name the folder of all tiers."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    walls = [each for each in contracts if "kv_transfer.tier" in each.get("forbidden_modules", [])]

    assert {source for each in walls for source in each["source_modules"]} == {"engine", "router"}
    assert [tier.name for tier in TIERS.values() if not tier.options.__module__.startswith("kv_transfer.tier.")] == []


def test_figures_are_those_that_were_kept() -> None:
    assert PAGES["docs/figures.md"] == figures_page(), "python -m scripts.figures_page > docs/figures.md"

    measured = PAGES["README.md"].partition("## Figures\n")[2].partition("\n## ")[0]
    rows = [line for line in measured.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert [row for row in rows if row not in PAGES["docs/figures.md"]] == []
