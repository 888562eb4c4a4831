"""A fake of Ray and Serve in this process, as commands see them: a store, drivers, one machine, applications.

Stands in at what we call of Ray and of Serve. Nothing starts; what becomes of an application is said beforehand.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.experimental.internal_kv import _initialize_internal_kv, _internal_kv_reset
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster.commands.signals import STOP_SIGNALS
from cluster.config.names import APP_NAME

RUNNING, STARTING, FAILED = ApplicationStatus.RUNNING, ApplicationStatus.DEPLOYING, ApplicationStatus.DEPLOY_FAILED
LEAVING = ApplicationStatus.DELETING
ADDRESS = "10.0.0.10:6379"


class FakeStore:
    """Ray's key-value store. ``before_each`` is called before every access."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.before_each: Callable[[], None] = lambda: None

    def internal_kv_get(self, key: bytes, namespace: bytes) -> bytes | None:
        """The value, if there is one."""
        self.before_each()
        return self.values.get(key)

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> int:
        """Set a value; returns the number of added keys."""
        self.before_each()
        is_new = key not in self.values
        if is_new or overwrite:
            self.values[key] = value
        return int(is_new)

    def internal_kv_del(self, key: bytes, del_by_prefix: bool, namespace: bytes) -> int:
        """Delete keys; returns the number of removed keys."""
        self.before_each()
        gone = [name for name in self.values if (name.startswith(key) if del_by_prefix else name == key)]
        for name in gone:
            del self.values[name]
        return len(gone)

    def internal_kv_keys(self, prefix: bytes, namespace: bytes) -> list[bytes]:
        """The keys with a prefix."""
        self.before_each()
        return [name for name in self.values if name.startswith(prefix)]


class FakePools:
    """The pools of Serve's application, and the number of replicas that each should have, by Ray's own rule.

    told: what Serve got last of each pool.
    targets: how many replicas there are to be; a test changes it as an autoscaler does.
    is_building: whether it builds another application meanwhile, and lists none of what it runs.
    """

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.targets: dict[str, int] = {}
        self.is_building = False
        self._infos: dict[str, DeploymentInfo] = {}
        self._autoscaling: dict[str, DeploymentAutoscalingState] = {}

    def take(self, graph: Any) -> None:
        """Deploy a graph."""
        pools = graph._bound_deployment.init_kwargs
        self.targets = {role: number for role, number in self.targets.items() if role in pools}
        for role, bound in pools.items():
            deployment = bound._bound_deployment
            self.told[role] = config = deployment._deployment_config
            self._infos[role] = info = DeploymentInfo(
                deployment_config=config,
                replica_config=deployment._replica_config,
                start_time_ms=0,
                deployer_job_id="",
                version=deployment.version,
            )
            is_scaled = config.autoscaling_config is not None
            self.targets[role] = self._register(role, info) if is_scaled else config.num_replicas

    def _register(self, role: str, info: DeploymentInfo) -> int:
        new = DeploymentAutoscalingState(DeploymentID(role, APP_NAME))
        return self._autoscaling.setdefault(role, new).register(info, self.targets.get(role, 0))

    def details(self) -> Mapping[str, Any]:
        """The pools in the format of Serve's controller."""
        listed = {} if self.is_building else self.targets
        return {role: {"target_num_replicas": number} for role, number in listed.items()}

    def infos(self) -> Mapping[DeploymentID, tuple[DeploymentInfo, None]]:
        """The information that Serve got last for each deployment."""
        return {DeploymentID(role, APP_NAME): (info, None) for role, info in self._infos.items()}

    def running(self) -> Mapping[DeploymentID, Sequence[None]]:
        """The running replicas, which are all of them."""
        return {DeploymentID(role, APP_NAME): (None,) * number for role, number in self.targets.items()}


class FakeRay:
    """One Ray, and the driver that is connected to it.

    outcomes: what becomes of each application that Serve is told to run, in turn; at last all run.
    told: the settings that Serve got each time, as the router has them. pools: what became of the workers' sizes.
    on_run, on_status, on_start: called when Serve was told what to run, when it is asked what does, and to start.
    """

    def __init__(self) -> None:
        self.store = FakeStore()
        self.living: set[str] = set()
        self.applications: dict[str, ApplicationStatus] = {}
        self.outcomes: list[ApplicationStatus] = []
        self.told: list[Any] = []
        self.pools = FakePools()
        self.on_run: Callable[[], None] = lambda: None
        self.on_status: Callable[[], None] = lambda: None
        self.on_start: Callable[[], None] = lambda: None
        self.client: Any = None
        self._job_id: str | None = None
        self._num_jobs = 0

    def connect(self, **_options: Any) -> None:
        """Connect as a driver."""
        self._num_jobs += 1
        self._job_id = f"{self._num_jobs:08x}"
        self.living.add(self._job_id)

    def disconnect(self) -> None:
        """Disconnect the driver."""
        self.living.discard(self._job_id or "")
        self._job_id = None

    @contextmanager
    def other_driver(self) -> Iterator[None]:
        """Run the block as another process would; afterwards our driver is connected again."""
        ours, self._job_id = self._job_id, None
        try:
            yield
        finally:
            self._job_id = ours

    def run(self, graph: Any, *, name: str, **_options: Any) -> None:
        """Deploy an application."""
        self.told.append(graph._bound_deployment.init_args[0])
        self.pools.take(graph)
        self.applications[name] = self.outcomes.pop(0) if self.outcomes else RUNNING
        self.on_run()

    def status(self) -> Any:
        """The status of the applications, as Serve reports it."""
        self.on_status()
        overviews = {
            name: ApplicationStatusOverview(status=status, message="", last_deployed_time_s=0, deployments={})
            for name, status in self.applications.items()
        }
        return SimpleNamespace(applications=overviews)

    def start_serve(self, http_options: Any, *_more: Any) -> tuple[Any, tuple[str, ...]]:
        """Start Serve's controller; also returns what to wait for until its proxy listens, which is immediately."""
        controller = SimpleNamespace(
            get_serve_instance_details=SimpleNamespace(remote=self._details),
            list_deployments_internal=SimpleNamespace(remote=lambda: self.pools.infos()),
            _all_running_replicas=SimpleNamespace(remote=lambda: self.pools.running()),
        )
        self.client = SimpleNamespace(http_config=SimpleNamespace(**http_options), _controller=controller)
        self.on_start()
        return self.client, ("proxy",)

    def _details(self) -> Mapping[str, Any]:
        """Everything that Serve's controller reports."""
        return {"applications": {name: {"deployments": self.pools.details()} for name in self.applications}}

    def shut_down_serve(self) -> None:
        """Shut Serve down with everything that it runs."""
        self.applications.clear()
        self.pools = FakePools()
        self.client = None

    def come_up(self) -> None:
        """Let everything that is starting run."""
        self.applications[APP_NAME] = RUNNING

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace Ray and Serve."""
        machine = {"Alive": True, "NodeManagerAddress": "10.0.0.10", "Resources": {"CPU": 8.0, "memory": 64.0 * 2**30}}
        context = SimpleNamespace(get_job_id=lambda: self._job_id)
        names = [f"{number:08x}" for number in range(1, 100)]
        patch.setattr(ray, "init", self.connect)
        patch.setattr(ray, "shutdown", self.disconnect)
        patch.setattr(ray, "is_initialized", lambda: self._job_id is not None)
        patch.setattr(ray, "nodes", lambda: [machine])
        patch.setattr(ray, "get", _get)
        patch.setattr(ray, "get_runtime_context", lambda: context)
        patch.setattr(
            "ray._private.state.jobs", lambda: [{"JobID": name, "IsDead": name not in self.living} for name in names]
        )
        patch.setattr("ray.serve.context._global_client", None)
        patch.setattr("ray.serve.context._global_client_job_id", None)
        patch.setattr("ray.serve.context._connect", lambda raise_if_no_controller_running=True: self.client)
        patch.setattr("cluster.deploy.serve_start._create_controller_and_proxy_refs", self.start_serve)
        patch.setattr("cluster.deploy.serve_start.ServeControllerClient", lambda controller: controller)
        patch.setattr(serve, "status", self.status)
        patch.setattr(serve, "start", lambda **_: None)
        patch.setattr(serve, "_run", self.run)
        patch.setattr(serve, "delete", lambda name: self.applications.pop(name))
        patch.setattr(serve, "shutdown", self.shut_down_serve)


def _get(references: Any, **_options: Any) -> Any:
    """Resolve references: the controller's answers, and that every proxy listens."""
    return [answer if isinstance(answer, Mapping) else None for answer in references]


@contextmanager
def fake_ray() -> Iterator[FakeRay]:
    """A Ray on which nothing runs. Signal handlers that commands install are removed afterwards."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    fake = FakeRay()
    with pytest.MonkeyPatch.context() as patch:
        _initialize_internal_kv(fake.store)
        fake.install(patch)
        try:
            yield fake
        finally:
            _internal_kv_reset()
            for number, handler in handlers.items():
                signal.signal(number, handler)
