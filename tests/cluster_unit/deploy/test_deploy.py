"""`baton deploy`, `baton serve --address` and `baton shutdown` against what others did, or began, on the same Ray."""

from __future__ import annotations

import io
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RaySystemError
from rich.console import Console

from cluster.commands.deploy import deploy, shutdown
from cluster.commands.signals import Stopped
from cluster.config.config import BatonConfig
from cluster.config.names import APP_NAME
from cluster.config.served_model import served_model
from cluster.deploy.deploy_record import read_deploy_record
from cluster.deploy.deployment import Deployment, RefusedStartError, StartError
from cluster.deploy.ray_home import RayUnavailableError, SharedRay
from cluster.serve_app import build
from engine.model.builtin import builtin_model_dir
from tests.support.cluster.fake_ray import ADDRESS, FAILED, LEAVING, RUNNING, STARTING, FakeRay


def config_of(port: int, **keys: Any) -> BatonConfig:
    return BatonConfig.model_validate({"address": ADDRESS, "port": port, **keys})


def run_deploy(port: int, **keys: Any) -> str:
    """Deploy; what was said."""
    said = io.StringIO()
    config = config_of(port, **keys)
    model = served_model(BatonConfig(served_model_name=config.served_model_name))
    deploy(config, model, ADDRESS, Console(file=said, width=500))
    return said.getvalue()


def run_shutdown() -> str:
    said = io.StringIO()
    shutdown(ADDRESS, Console(file=said))
    return said.getvalue().strip()


def other_serve(port: int) -> SharedRay:
    return SharedRay(address=ADDRESS, host="127.0.0.1", port=port, what=f"tiny on 127.0.0.1:{port}")


def press_ctrl_c() -> None:
    raise Stopped(signal.SIGINT)


def leave_it(ray: FakeRay, moment: str, port: int, **keys: Any) -> None:
    """Deploy, and stop it by Ctrl-C at that moment."""
    ray.outcomes = [STARTING]
    setattr(ray, moment, lambda: press_ctrl_c() if ray.told or moment == "on_start" else None)
    with pytest.raises(Stopped):
        run_deploy(port, **keys)
    setattr(ray, moment, lambda: None)


def statuses(ray: FakeRay) -> list[Any]:
    return [settings.router.max_num_requests for settings in ray.told]


@pytest.mark.parametrize("moment", ["on_run", "on_status"])
@pytest.mark.parametrize("comes_up", [False, True])
def test_first_deployment_that_was_not_waited_for_keeps_other_models_out(
    ray: FakeRay, port: int, tmp_path: Path, moment: str, comes_up: bool
) -> None:
    leave_it(ray, moment, port)
    if comes_up:
        ray.come_up()

    with pytest.raises(RefusedStartError, match=rf"\(model: null -> {tmp_path}/other\): run `baton shutdown --address"):
        run_deploy(port, model=tmp_path / "other")

    assert len(ray.told) == 1
    assert APP_NAME in ray.applications


def test_first_deployment_that_was_not_waited_for_is_waited_for_by_the_next(ray: FakeRay, port: int) -> None:
    leave_it(ray, "on_status", port)

    assert "the one that was deployed before and has not come up yet" in run_deploy(port)
    assert "the running one" in run_deploy(port)


def test_what_came_up_while_nobody_waited_comes_back_when_an_update_fails(ray: FakeRay, port: int) -> None:
    leave_it(ray, "on_status", port, router={"max_num_requests": 11})
    ray.come_up()
    ray.outcomes = [FAILED]

    with pytest.raises(StartError, match=r"\(the previous configuration runs again\)"):
        run_deploy(port, router={"max_num_requests": 22})

    assert statuses(ray) == [11, 22, 11]
    assert ray.applications[APP_NAME] == RUNNING


def test_what_never_came_up_is_not_taken_off_when_an_update_of_it_fails(ray: FakeRay, port: int) -> None:
    leave_it(ray, "on_status", port, router={"max_num_requests": 11})
    ray.outcomes = [FAILED, STARTING]

    with pytest.raises(StartError, match=r"\(Serve continues with the previous configuration\)"):
        run_deploy(port, router={"max_num_requests": 22})

    assert statuses(ray) == [11, 22, 11]
    assert ray.applications[APP_NAME] == STARTING


def test_update_that_was_not_waited_for_is_what_ran_before_once_it_runs(ray: FakeRay, port: int) -> None:
    run_deploy(port, router={"max_num_requests": 11})
    ray.told.clear()
    leave_it(ray, "on_status", port, router={"max_num_requests": 22})
    ray.come_up()
    ray.outcomes = [FAILED]

    with pytest.raises(StartError, match="runs again"):
        run_deploy(port, router={"max_num_requests": 33})

    assert statuses(ray) == [22, 33, 22]


def test_update_that_never_came_up_is_not_what_ran_before(ray: FakeRay, port: int) -> None:
    run_deploy(port, router={"max_num_requests": 11})
    ray.told.clear()
    leave_it(ray, "on_status", port, router={"max_num_requests": 22})
    ray.outcomes = [FAILED]

    with pytest.raises(StartError, match="runs again"):
        run_deploy(port, router={"max_num_requests": 33})

    assert statuses(ray) == [22, 33, 11]


def test_first_deployment_that_fails_leaves_nothing(ray: FakeRay, port: int, tmp_path: Path) -> None:
    ray.outcomes = [FAILED]
    with pytest.raises(StartError):
        run_deploy(port)

    assert ray.client is None
    assert read_deploy_record().told is None
    assert run_shutdown() == "nothing is deployed"


def test_first_deployment_that_is_not_ready_in_time_leaves_nothing(ray: FakeRay, port: int) -> None:
    ray.outcomes = [STARTING]
    with pytest.raises(StartError, match=r"not all workers were ready within 0\.001 s"):
        run_deploy(port, startup_timeout_s=0.001)

    assert not ray.applications


def test_deployment_that_got_no_further_than_serve_is_no_obstacle_and_can_be_shut_down(ray: FakeRay, port: int) -> None:
    leave_it(ray, "on_start", port)
    assert ray.client is not None
    ray.outcomes = [RUNNING]

    assert run_shutdown() == "stopped"

    assert ray.client is None
    run_deploy(port, served_model_name="other")
    assert statuses(ray) == [2048]


def test_cluster_that_nobody_recorded_is_left_alone(ray: FakeRay, port: int) -> None:
    ray.connect()
    ray.start_serve({"host": "127.0.0.1", "port": port})
    ray.applications[APP_NAME] = RUNNING

    with pytest.raises(RefusedStartError, match=r"its model is not known.*baton shutdown --address"):
        run_deploy(port)

    assert not ray.told


def test_record_with_keys_of_another_version_still_keeps_other_models_out(ray: FakeRay, port: int) -> None:
    run_deploy(port, served_model_name="mine")
    for key, value in ray.store.values.items():
        ray.store.values[key] = value.replace(b'"port"', b'"gone": 1, "port"')

    with pytest.raises(RefusedStartError, match="served_model_name: mine -> other"):
        run_deploy(port, served_model_name="other")
    ray.outcomes = [FAILED]
    with pytest.raises(StartError, match="deployed by another version of Baton and cannot be restored"):
        run_deploy(port, served_model_name="mine", decode_replicas=2)

    assert APP_NAME in ray.applications


def test_what_a_serve_configuration_deployed_keeps_other_models_out(ray: FakeRay, port: int) -> None:
    ray.connect()
    ray.start_serve({"host": "0.0.0.0", "port": port})
    ray.run(build({"served_model_name": "mine"}), name=APP_NAME)
    ray.disconnect()

    with pytest.raises(RefusedStartError, match="served_model_name: mine -> other"):
        run_deploy(port, host="0.0.0.0", served_model_name="other")


def test_second_deployment_at_once_is_refused_and_changes_nothing(ray: FakeRay, port: int) -> None:
    def other_deploys() -> None:
        ray.on_start = lambda: None
        with ray.other_driver():
            run_deploy(port, served_model_name="second")

    ray.on_start = other_deploys
    with pytest.raises(
        RayUnavailableError,
        match=rf"^the Ray at {ADDRESS} is being deployed to: baton-tiny on 127\.0\.0\.1:{port}, of the `baton deploy` "
        rf"that .+ started on .+: wait until that has ended, or stop it there \(pid \d+\)",
    ):
        run_deploy(port)

    assert not ray.told


def test_second_serve_at_once_is_told_of_the_first_and_does_it_no_harm(ray: FakeRay, port: int) -> None:
    first, second = other_serve(port), other_serve(port + 1)
    first.start()  # and no application yet

    with ray.other_driver():
        with pytest.raises(
            RayUnavailableError,
            match=rf"^the Ray at {ADDRESS} already runs a Baton cluster: tiny on 127\.0\.0\.1:{port}, of the "
            r"`baton serve` that .+ started on .+: stop it first, there \(pid \d+\) or with "
            rf"`baton shutdown --address {ADDRESS}`",
        ):
            second.start()
        ray.applications[APP_NAME] = RUNNING
        second.stop()

    assert first.is_alive()
    first.stop()
    assert not ray.applications


def test_deployment_beside_a_serve_that_starts_is_refused(ray: FakeRay, port: int) -> None:
    other_serve(port).start()

    with (
        ray.other_driver(),
        pytest.raises(RayUnavailableError, match=r"already runs a Baton cluster: .* of the `baton serve`"),
    ):
        run_deploy(port)


def test_serve_on_the_ray_of_a_deployment_is_told_how_to_end_that(ray: FakeRay, port: int) -> None:
    run_deploy(port)
    home = other_serve(port)

    with pytest.raises(
        RayUnavailableError,
        match=rf"already runs a Baton cluster, baton-tiny on 127\.0\.0\.1:{port}, of the `baton deploy` that .*: "
        rf"end it with `baton shutdown --address {ADDRESS}`",
    ):
        home.start()
    home.stop()

    assert ray.applications[APP_NAME] == RUNNING


def test_cluster_that_a_killed_serve_left_is_shut_down_first(ray: FakeRay, port: int) -> None:
    claim = other_serve(port).start()
    config = config_of(port)
    Deployment(config=config, model=served_model(config), claim=claim).hand_over()
    ray.disconnect()
    second = other_serve(port)

    with pytest.raises(
        RefusedStartError, match=r"still runs the cluster of a `baton serve` that ended.*baton shutdown"
    ):
        run_deploy(port)
    with pytest.raises(RayUnavailableError, match=r"already runs a Baton cluster, .* of the `baton serve`"):
        second.start()
    second.stop()

    assert run_shutdown() == "stopped"
    run_deploy(port)


def test_cluster_that_is_still_going_is_waited_for_by_the_caller(ray: FakeRay, port: int) -> None:
    run_deploy(port)
    ray.applications[APP_NAME] = LEAVING
    second = other_serve(port)

    with pytest.raises(RayUnavailableError, match="still being removed and finishes its requests"):
        run_deploy(port, served_model_name="other")
    with pytest.raises(RayUnavailableError, match="still being removed"):
        second.start()
    second.stop()

    assert len(ray.told) == 1
    assert run_shutdown() == "stopped"
    run_deploy(port, served_model_name="other")


def test_other_weights_at_the_same_place_are_another_model(ray: FakeRay, port: int, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(builtin_model_dir(), path)
    deploy_from(path, port)
    deploy_from(path, port)
    (weights,) = path.glob("*.safetensors")
    content = weights.read_bytes()
    trained = len(content) // 2
    weights.write_bytes(content[:trained] + bytes(byte ^ 1 for byte in content[trained:]))

    with pytest.raises(
        RefusedStartError, match=rf"the files in {path} have changed since they were deployed.*old files back"
    ):
        deploy_from(path, port)

    assert len(ray.told) == 2
    run_shutdown()
    deploy_from(path, port)


def deploy_from(path: Path, port: int) -> None:
    config = config_of(port, model=path)
    deploy(config, served_model(config), ADDRESS, Console(file=io.StringIO()))


def lose_ray() -> None:
    raise RaySystemError("the GCS does not answer")


def test_ray_that_is_lost_meanwhile_is_one_line(ray: FakeRay, port: int, tmp_path: Path) -> None:
    ray.on_status = lambda: lose_ray() if ray.told else None
    with pytest.raises(
        StartError, match=r"10\.0\.0\.10:6379 stopped answering: .*the GCS does not answer; Serve keeps"
    ):
        run_deploy(port)
    with pytest.raises(RayUnavailableError, match=r"stopped answering: .*run the command again"):
        run_shutdown()

    ray.on_status = lambda: None
    with pytest.raises(RefusedStartError, match="model: null"):
        run_deploy(port, model=tmp_path / "other")


def test_commands_one_after_the_other_do_not_keep_each_other_out(ray: FakeRay, port: int) -> None:
    run_deploy(port)
    run_deploy(port, decode_replicas=2)
    assert run_shutdown() == "stopped"
    home = other_serve(port)
    home.start()
    home.stop()
    run_deploy(port, served_model_name="other")


def test_deployment_says_what_the_network_must_guarantee(ray: FakeRay, port: int) -> None:
    assert "warning: KV moves over ports of UCX, which have no authentication" in run_deploy(port)
    assert "warning" not in run_deploy(port, kv_transfer={"transport": "local"})


def test_deployment_says_what_a_pool_cannot_become(ray: FakeRay, port: int) -> None:
    decode = {"max_per_node": 1, "scaling": {"max_replicas": 3}}

    assert "warning: decode.scaling.max_replicas is 3, but" in run_deploy(port, decode=decode)
