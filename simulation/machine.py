"""What takes how much time in a virtual cluster: a machine's steps, its network, its memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from engine.contract.step_time import LEAST_DELAY, StepTimeModel, StepWork


class MachineFileError(ValueError):
    """A file does not describe a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferModel:
    """How long a read of KV takes: ``latency_s`` for each message, and the bytes at the rate of a worker's link. Reads
    by a worker and reads from it use its link one after the other. ``spread``: standard deviation of the logarithm of
    a read's times, relative to the usual ones.
    """

    latency_s: float = 5e-4
    bytes_per_s: float = 2e9
    spread: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """How long a link is busy with ``num_bytes``."""
        return num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterModel:
    """The time that a router and its connections to workers add.

    accept_s: from the client's request until the router has its tokens. call_s: the time of a call to a worker, and of
    its answer. message_s: until a step's tokens reach the client; message_wait_s: what they wait for a core on their
    way besides, on average. It is drawn for each message, exponentially distributed.
    """

    accept_s: float = 3e-3
    call_s: float = 5e-4
    message_s: float = 1e-3
    message_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine of a simulated worker.

    shared_step_time: prices of steps that begin while another worker of the same host computes; None: the same prices.
    workers_per_host: number of workers that share a host, if that makes a difference.
    step_noise: standard deviation of the logarithm of a step's time divided by the predicted time.
    step_skew: deviations above the median are multiplied by this, those below divided by it, because delays are larger
        than savings (docs/virtual-cluster.md).
    step_delayed: the share of steps that something delays besides, and ``step_delay`` how much longer they take on
        average, at least ``LEAST_DELAY`` times what they take otherwise; see ``StepTimeModel``.
    noise_s: longer steps vary less, since delays and savings within them make up for each other: as the mean of as many
        independent parts of this length. 0: all steps vary alike.
    prompt_base_s: what a step without decode rows takes before its first token, if that is not the ``base_s`` of its
        prices: such steps are those of prefill workers, who compute while others of their host do.
    loads_within_steps: hand-overs that come within a step begin at once. On GPUs, steps are computed without the host,
        and hand-overs wait for their end.
    kv_bytes_per_token: size of the model's KV per token. num_blocks: number of blocks, of ``block_size`` tokens each.
    """

    name: str
    step_time: StepTimeModel
    shared_step_time: StepTimeModel | None = None
    workers_per_host: int = 1
    transfer: TransferModel = field(default_factory=TransferModel)
    router: RouterModel = field(default_factory=RouterModel)
    step_noise: float = 0.0
    step_skew: float = 1.0
    step_delayed: float = 0.0
    step_delay: float = 0.0
    noise_s: float = 0.0
    prompt_base_s: float | None = None
    loads_within_steps: bool = True
    kv_bytes_per_token: int = 12_288
    block_size: int = 16
    num_blocks: int = 4096
    max_model_len: int = 2048

    def __post_init__(self) -> None:
        counts = ("workers_per_host", "kv_bytes_per_token", "block_size", "num_blocks", "max_model_len")
        for name in counts:
            if getattr(self, name) < 1:
                raise MachineFileError(f"{self.name}: {name} must be at least 1, got {getattr(self, name)}")
        if self.transfer.bytes_per_s <= 0.0:
            raise MachineFileError(f"{self.name}: bytes_per_s must be above 0, got {self.transfer.bytes_per_s}")
        for name in ("noise_s", "prompt_base_s"):
            if (getattr(self, name) or 0.0) < 0.0:
                raise MachineFileError(f"{self.name}: {name} must not be below 0, got {getattr(self, name)}")
        self._check_delays()
        if self.step_skew <= 0.0:
            raise MachineFileError(f"{self.name}: step_skew must be above 0, got {self.step_skew}")
        for model in (self.step_time, self.shared_step_time):
            if model is not None and model.num_steps < 1:
                raise MachineFileError(
                    f"{self.name}: its step times were fitted to {model.num_steps} steps, so that nothing would take "
                    "any time; fit them, or say in num_steps how many steps the prices come from"
                )

    def _check_delays(self) -> None:
        if not 0.0 <= self.step_delayed < 1.0:
            raise MachineFileError(f"{self.name}: step_delayed must be from 0 to below 1, got {self.step_delayed}")
        if self.step_delayed and self.step_delay < LEAST_DELAY:
            raise MachineFileError(f"{self.name}: step_delay must be at least {LEAST_DELAY}, got {self.step_delay}")
        if self.router.message_wait_s < 0.0:
            raise MachineFileError(f"{self.name}: message_wait_s must not be below 0, got {self.router.message_wait_s}")

    def step_time_beside(self, num_computing: int) -> StepTimeModel:
        """The prices of a step that begins while ``num_computing`` other workers of the host compute."""
        return self.step_time if self.shared_step_time is None or not num_computing else self.shared_step_time

    def seconds_beside(self, num_computing: int, work: StepWork) -> float:
        """How long a step takes without noise that begins while so many other workers of the host compute."""
        model = self.step_time_beside(num_computing)
        if self.prompt_base_s is None or work.num_rows:
            return model.seconds(work)
        alone_s = self.step_time.base_s
        slowness = model.base_s / alone_s if alone_s else 1.0
        return model.seconds(work) + slowness * (self.prompt_base_s - alone_s)

    @property
    def shares_cores(self) -> bool:
        """True when a worker uses the cores of idle workers of its host."""
        return self.shared_step_time is not None and self.workers_per_host > 1

    def cores_beside(self, num_computing: int) -> float:
        """The cores that a worker then computes on, as a multiple of its own: all of the host's, or its own."""
        return float(self.workers_per_host) if self.shares_cores and not num_computing else 1.0

    def save(self, file: Path) -> None:
        """Write it as JSON, which ``load_machine`` reads."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")


def load_machine(file: Path) -> Machine:
    """The machine that a JSON file describes.

    Raises:
        MachineFileError: It does not describe one; the message says what is wrong.
    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise MachineFileError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise MachineFileError(f"{file} does not describe a machine: {error}") from error
    return parse_machine(content, str(file))


def parse_machine(content: object, place: str) -> Machine:
    """The machine from parsed JSON. ``place`` names its origin in error messages.

    Raises:
        MachineFileError: It is not a machine; the message says what is wrong.
    """
    try:
        machine: Machine = TypeAdapter(Machine).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise MachineFileError(f"{place}: {key}: {first['msg']}") from error
    except ValueError as error:
        raise MachineFileError(f"{place} does not describe a machine: {error}") from error
    assert isinstance(content, dict)
    unknown = sorted(_keys(content) - _keys(asdict(machine)))
    if unknown:
        raise MachineFileError(f"{place}: {unknown[0]} is not a key of a machine")
    return machine


def _keys(content: Mapping[str, object], prefix: str = "") -> set[str]:
    """All keys; those of nested objects as ``object.key``."""
    keys = {f"{prefix}{key}" for key in content}
    nested = [_keys(value, f"{prefix}{key}.") for key, value in content.items() if isinstance(value, dict)]
    return keys.union(*nested)


CPU_CORE = Machine(
    name="cpu_core",
    step_time=StepTimeModel(
        base_s=1.5e-2, row_s=1e-4, context_token_s=3.6e-6, prompt_token_s=8.7e-4, prompt_read_s=2.2e-7,
        error=0.08, num_steps=294,
    ),
    step_noise=0.12,
)  # fmt: skip
"""A worker with one thread, deployed beside others on a machine of two cores, and a random Llama of 125 M parameters in
bfloat16: what ``benchmarks.virtual_fit`` measured, times what deploying it cost.
"""

CPU_PAIR = replace(
    CPU_CORE,
    name="cpu_pair",
    step_time=StepTimeModel(
        base_s=1.17e-2, row_s=0.0, context_token_s=2.1e-6, prompt_token_s=5.5e-4, prompt_read_s=4.7e-8,
        error=0.09, num_steps=458,
    ),
)  # fmt: skip
"""A worker with two threads, alone on such a machine."""

CPU_HOST = replace(
    CPU_CORE,
    name="cpu_host",
    step_time=StepTimeModel(
        base_s=0.0205, row_s=0.0003, context_token_s=3e-06, prompt_token_s=0.00026, prompt_read_s=5.3e-08,
        error=0.08, num_steps=294,
    ),
    shared_step_time=StepTimeModel(
        base_s=0.023, row_s=0.0004, context_token_s=4e-06, prompt_token_s=0.00029, prompt_read_s=6.4e-08,
        error=0.08, num_steps=294,
    ),
    workers_per_host=2,
    transfer=TransferModel(latency_s=0.0071, bytes_per_s=2000000000.0, spread=0.42),
    router=RouterModel(accept_s=0.011),
    step_noise=0.1,
    step_skew=1.7,
)  # fmt: skip
"""Two workers with one thread each, deployed on a host of two cores with their router, and the same model: what
``benchmarks.whatif_check --fit`` fitted to real runs. A worker uses the core of one that is idle.
"""

GPU = Machine(
    name="gpu",
    step_time=StepTimeModel(
        base_s=7e-3, row_s=2e-5, context_token_s=6e-8, prompt_token_s=4.2e-5, prompt_read_s=1.3e-9,
        error=1.0, num_steps=1,
    ),
    transfer=TransferModel(latency_s=1e-4, bytes_per_s=40e9),
    loads_within_steps=False,
    kv_bytes_per_token=131_072,
    num_blocks=24_000,
    max_model_len=131_072,
)  # fmt: skip
"""An H100 with Llama 3.1 8B in bfloat16 as its data sheet has it: 16 GB of weights read at 70 % of 3.35 TB/s a step, 16
GFLOP a prompt token at 40 % of 990 TFLOP/s, 128 KiB of KV a token. Computed, not measured.
"""

H200 = replace(
    GPU,
    name="h200",
    step_time=StepTimeModel(
        base_s=4.6e-3, row_s=1.3e-5, context_token_s=3.1e-8, prompt_token_s=1.85e-5, prompt_read_s=2.7e-9,
        error=1.0, num_steps=1,
    ),
)  # fmt: skip
"""An H200 with such a model: step times as ``benchmarks.gpu`` measured them (results/gpu.json), and reads of a row's KV
at the rate of its memory."""

H200_PAIR = replace(
    H200,
    name="h200_pair",
    shared_step_time=replace(
        H200.step_time,
        base_s=2 * H200.step_time.base_s,
        row_s=2 * H200.step_time.row_s,
        context_token_s=2 * H200.step_time.context_token_s,
        prompt_token_s=2 * H200.step_time.prompt_token_s,
        prompt_read_s=2 * H200.step_time.prompt_read_s,
    ),
    workers_per_host=2,
    transfer=TransferModel(latency_s=3e-3, bytes_per_s=130e9),
    num_blocks=GPU.num_blocks // 2,
)
"""Two workers that share this GPU, and take turns while both compute. Hand-overs stay within its memory."""

MACHINES = {machine.name: machine for machine in (CPU_HOST, CPU_CORE, CPU_PAIR, GPU, H200, H200_PAIR)}
