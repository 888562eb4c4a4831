"""The files from which users start a cluster: each is checked against the schema of the program that reads it."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from cluster.config.config import BatonConfig
from cluster.config.names import APP_NAME
from cluster.deploy.serve_env import node_environment

DEPLOY = Path(__file__).parents[2] / "deploy"
CLUSTERS = ("own-machines", "aws", "gcp")
CLOUDS = ("aws", "gcp")
POOL_RESOURCES = ("baton_prefill", "baton_decode")


def read(name: str) -> dict[str, Any]:
    content = yaml.safe_load((DEPLOY / name).read_text())
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_up_takes_the_file(name: str) -> None:
    validate_config(prepare_config(read(f"{name}.yaml")))


@pytest.mark.parametrize("name", CLOUDS)
def test_clouds_have_a_machine_type_for_each_pool_and_none_of_it_on_the_head(name: str) -> None:
    types = read(f"{name}.yaml")["available_node_types"]

    assert types["head"]["resources"] == {"CPU": 0, "GPU": 0}
    for pool in ("prefill", "decode"):
        assert types[pool]["resources"][f"baton_{pool}"] == 1
        assert types[pool]["resources"]["GPU"] >= 1


def test_every_worker_machine_of_a_cloud_may_run_at_once() -> None:
    for name in CLOUDS:
        content = read(f"{name}.yaml")
        assert content["max_workers"] == sum(kind["max_workers"] for kind in content["available_node_types"].values())


CLOUD_LIBRARIES = {"aws": "boto3", "gcp": "google-api-python-client"}


@pytest.mark.parametrize("name", CLOUDS)
def test_machines_of_a_cloud_run_no_setup_command_of_ray_s_own(name: str) -> None:
    """Ray's defaults install into the system's Python, which a fresh Ubuntu cannot, and where the head's Ray is not."""
    prepared = prepare_config(read(f"{name}.yaml"))

    ours = ("sh ~/baton/deploy/", "make -C ~/baton ", "~/baton-venv/bin/python -m pip ")
    for command in (*prepared["head_setup_commands"], *prepared["worker_setup_commands"]):
        assert command.startswith(ours), command


@pytest.mark.parametrize("name", CLOUDS)
def test_head_in_a_cloud_can_ask_it_for_machines(name: str) -> None:
    (command,) = read(f"{name}.yaml")["head_setup_commands"]

    assert command.startswith("~/baton-venv/bin/python -m pip install")
    assert CLOUD_LIBRARIES[name] in command


@pytest.mark.parametrize("name", CLOUDS)
def test_machines_of_a_cloud_have_a_python_that_is_new_enough(name: str) -> None:
    text = (DEPLOY / f"{name}.yaml").read_text()

    assert "2404" in text.replace(".", "")
    assert "ubuntu-2204" not in text
    assert "Ubuntu 22.04" not in text


def test_ray_makes_no_security_group_whose_port_22_is_open_to_the_world() -> None:
    """The one that it makes has a rule for 0.0.0.0/0, whatever other rules are asked for."""
    content = read("aws.yaml")

    assert "security_group" not in content["provider"]
    for kind in content["available_node_types"].values():
        assert kind["node_config"]["SecurityGroupIds"]


@pytest.mark.parametrize(("num_failures", "calls"), [(0, 2), (3, 5)])
def test_packages_are_installed_without_a_question_once_the_machine_s_own_updates_are_done(
    num_failures: int, calls: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    programs = {
        "cloud-init": "exit 2",  # what it returns when some of its modules failed
        "sudo": 'exec "$@"',
        "sleep": "exit 0",
        "apt-get": f'echo "$DEBIAN_FRONTEND $NEEDRESTART_MODE $*" >> {log}; [ $(wc -l < {log}) -gt {num_failures} ]',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run(["sh", DEPLOY / "packages.sh"], env=environment, check=True)

    said = log.read_text().splitlines()
    assert len(said) == calls
    assert all(line.startswith("noninteractive a ") for line in said)
    assert [line.split()[-1] for line in said] == ["update"] * (calls - 1) + ["python3-venv"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_starts_with_our_environment_and_keeps_its_dashboard_to_itself(name: str) -> None:
    content = read(f"{name}.yaml")
    starts = [content["head_start_ray_commands"][-1], content["worker_start_ray_commands"][-1]]

    assert all(
        command.startswith(". ~/baton/deploy/node.sh;") and "baton_start ray start" in command for command in starts
    )
    assert all("$BATON_NODE_OPTIONS" in command for command in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert content["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_own_machines_name_every_worker_in_one_list_of_roles() -> None:
    content = read("own-machines.yaml")
    lists = re.findall(r"'([0-9. ]+)'", content["worker_start_ray_commands"][-1])

    assert sorted(" ".join(lists).split()) == sorted(content["provider"]["worker_ips"])


def shell(command: str, home: Path) -> str:
    """The output of a command in bash after node.sh was sourced, in a home directory that may be written to."""
    script = f"set -e; . {DEPLOY}/node.sh; {command}"
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(home)}
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    return result.stdout


def test_node_environment_is_what_serve_needs(tmp_path: Path) -> None:
    said = dict(line.partition("=")[::2] for line in shell("env", tmp_path).splitlines())

    assert {name: said.get(name) for name in node_environment()} == node_environment()
    assert said["RAY_AUTH_MODE"] == "token"
    assert said["PATH"].startswith(f"{tmp_path}/baton-venv/bin:")


@pytest.mark.parametrize(("num_failures", "tries"), [(0, 1), (2, 3), (3, 3)])
def test_ray_is_started_up_to_three_times(num_failures: int, tries: int, tmp_path: Path) -> None:
    counting = f"count=0; ray() {{ true; }}; start() {{ count=$((count + 1)); [ $count -gt {num_failures} ]; }}"

    said = shell(f"{counting}; baton_start start && echo up; echo $count", tmp_path)

    assert said.split() == [*(["up"] if num_failures < 3 else []), str(tries)]


def test_ray_is_stopped_on_every_machine_and_those_that_do_not_answer_are_named(tmp_path: Path) -> None:
    content = {"auth": {"ssh_user": "ann"}, "provider": {"worker_ips": ["10.0.0.11", "10.0.0.12"]}}
    (tmp_path / "ray_bootstrap_config.yaml").write_text(yaml.safe_dump(content))
    fakes = (
        f'python() {{ {sys.executable} "$@"; }}; ray() {{ echo "here: ray $*"; }}; '
        'ssh() { echo "${@: -2:1}: ${@: -1}"; [ "${@: -2:1}" != ann@10.0.0.12 ]; }'
    )

    said = shell(f"{fakes}; baton_stop 2>&1", tmp_path).splitlines()

    over_there = ". ~/baton/deploy/node.sh; ray stop"
    assert sorted(said[:-1]) == [
        "Ray was not stopped on 10.0.0.12",
        f"ann@10.0.0.11: {over_there}",
        f"ann@10.0.0.12: {over_there}",
    ]
    assert said[-1] == "here: ray stop"


def test_image_has_what_serve_needs() -> None:
    text = (DEPLOY / "Dockerfile").read_text()

    for name, value in node_environment().items():
        assert f"{name}={value}" in text


def test_image_has_every_package_and_a_user_that_kubernetes_knows_not_to_be_root() -> None:
    instructions = [line.split() for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line]
    pyproject = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    packages = {name for name in pyproject["tool"]["setuptools"]["packages"]["find"]["include"] if "." not in name}
    sent = (DEPLOY / "Dockerfile.dockerignore").read_text().split()

    assert packages <= {words[1] for words in instructions if words[0] == "COPY"}
    assert packages <= {line.removeprefix("!") for line in sent if line.startswith("!")}
    (user,) = (words[1] for words in instructions if words[0] == "USER")
    assert int(user) > 0


@pytest.mark.parametrize(
    ("address", "offered"),
    [
        ("10.0.0.1", '{"baton_prefill": 1}'),
        ("10.0.0.2", '{"baton_prefill": 1, "baton_decode": 1}'),
        ("10.0.0.3", '{"baton_decode": 1}'),
        ("10.0.0.30", "{}"),
    ],
)
def test_roles_of_machines(address: str, offered: str, tmp_path: Path) -> None:
    said = shell(f"baton_resources {address} '10.0.0.1 10.0.0.2' '10.0.0.2 10.0.0.3'", tmp_path)

    assert said.strip() == offered


def check_serve_config(content: dict[str, Any]) -> None:
    schema = ServeDeploySchema.model_validate(content)
    (application,) = schema.applications
    assert application.name == APP_NAME
    assert application.import_path == "cluster.serve_app:build"
    BatonConfig.model_validate(application.args)


def test_serve_takes_its_configuration_and_baton_the_arguments_in_it() -> None:
    check_serve_config(read("serve-config.yaml"))


def test_kubernetes_takes_every_pod_and_serve_the_configuration_within() -> None:
    service = read("kubernetes/rayservice.yaml")
    spec = service["spec"]

    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert set(spec) == {"serveConfigV2", "rayClusterConfig", "rayClusterDeletionDelaySeconds"}
    check_serve_config(yaml.safe_load(spec["serveConfigV2"]))
    cluster = spec["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, "1.34", strict=True)
        for container in group["template"]["spec"]["containers"]:
            assert container["securityContext"] == {"runAsNonRoot": True, "allowPrivilegeEscalation": False}
    assert cluster["authOptions"] == {"mode": "token"}
    offered = [group["rayStartParams"].get("resources", "") for group in groups[1:]]
    assert [name for name in POOL_RESOURCES if any(name in text for text in offered)] == list(POOL_RESOURCES)


def test_kubernetes_keeps_a_cluster_that_was_replaced_until_its_answers_have_ended() -> None:
    spec = read("kubernetes/rayservice.yaml")["spec"]
    config = BatonConfig.model_validate(yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"])

    assert spec["rayClusterDeletionDelaySeconds"] >= config.router_settings().default_timeout_s


def test_kubernetes_has_the_ray_that_we_need() -> None:
    pyproject = (DEPLOY.parent / "pyproject.toml").read_text()
    version = re.search(r'"ray\[serve\]==([0-9.]+)"', pyproject)

    assert version is not None
    assert read("kubernetes/rayservice.yaml")["spec"]["rayClusterConfig"]["rayVersion"] == version.group(1)


def mode_of(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_token_made_as_the_guide_says_is_for_its_owner_alone(tmp_path: Path) -> None:
    guide = (DEPLOY.parent / "docs" / "operations.md").read_text()
    (recipe,) = [block for block in re.findall(r"```sh\n(.*?)```", guide, re.DOTALL) if "get-auth-token" in block]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}

    script = f"set -e; umask 022\n{recipe}\ntouch later"
    subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, check=True, capture_output=True)

    assert mode_of(tmp_path / ".ray" / "auth_token") == 0o600
    assert mode_of(tmp_path / "later") == 0o644


def test_node_keeps_token_and_logs_to_its_user(tmp_path: Path) -> None:
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("0" * 64)
    token.chmod(0o644)

    shell("mkdir $HOME/logs; touch $HOME/logs/worker.out", tmp_path)

    assert [mode_of(token), mode_of(tmp_path / "logs"), mode_of(tmp_path / "logs" / "worker.out")] == [
        0o600,
        0o700,
        0o600,
    ]
