"""Leanings follow the load and settle when it does; if the router that decides dies, another one does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.messages import LoadReport
from engine.contract.step_time import StepTimeModel
from router.balance.leaning_control import LeaningControl
from router.balance.leanings import EVIDENCE_S, HELD_S, MIN_STAY_S, LeaningGoals
from router.pool.replica import Replica
from router.pool.workers import WorkerPool, WorkerUnavailableError
from router.report.counters import RouterCounters
from router.report.router_report import LeaningNote
from router.settings import RouterSettings
from tests.support.router.balance_world import replica_of
from tests.support.router.fake_workers import FakeDecodePool, FakePrefillPool

QUICK = settings(max_examples=15, deadline=None)
GOALS = LeaningGoals(ttft_s=1.0, itl_s=0.05, max_usage=0.9)
TOKEN_S = 1e-4
MODEL = StepTimeModel(base_s=0.005, row_s=0.001, prompt_token_s=TOKEN_S, error=0.05, num_steps=1000)
TICK_S = 0.5


@dataclass(slots=True, kw_only=True)
class LeaningWorld:
    """Prompts spread over the workers that lean to them, streams over the others. ``changes`` say when what changed."""

    leanings: dict[str, str]
    prompt_rate: float = 0.0
    num_rows: float = 0.0
    num_routers: int = 1
    now_s: float = 1000.0
    queues: dict[str, float] = field(default_factory=dict)
    step_s: dict[str, float] = field(default_factory=dict)
    controls: dict[str, LeaningControl] = field(default_factory=dict)
    counters: dict[str, RouterCounters] = field(default_factory=dict)
    notes: list[LeaningNote] = field(default_factory=list)
    changes: list[tuple[float, str, str, str]] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    workers: WorkerPool = field(default_factory=lambda: FakeDecodePool(prefill=FakePrefillPool()))

    def __post_init__(self) -> None:
        for index in range(self.num_routers):
            name = f"r{index}"
            self.counters[name] = RouterCounters()
            self.controls[name] = LeaningControl(
                self,
                self,
                view=self,
                own_id=name,
                settings=RouterSettings(),
                counters=self.counters[name],
                goals=GOALS,
                clock=lambda: self.now_s,
                wall_clock=lambda: self.now_s,
            )

    def live_router_ids(self) -> Collection[str]:
        return tuple(self.controls)

    def note_leaning(self, change: LeaningNote) -> None:
        self.notes.append(change)

    def hold_leaning(self, replica_id: str, *, until_s: float) -> None:
        self.held[replica_id] = until_s

    def held_leanings(self) -> Mapping[str, float]:
        return self.held

    @property
    def replicas(self) -> list[Replica]:
        return [
            replica_of(name, self.load_of(name), now_s=self.now_s) for name in self.leanings if name not in self.dead
        ]

    def age_s(self, replica: Replica) -> float:
        return 0.0

    async def lean(self, replica_id: str, role: str) -> str:
        if replica_id in self.dead:
            raise WorkerUnavailableError(replica_id=replica_id, reason="killed by the test")
        before, self.leanings[replica_id] = self.leanings[replica_id], role
        self.changes.append((self.now_s, replica_id, before, role))
        return before

    def leaning_to(self, role: str) -> list[str]:
        return [name for name, leaning in self.leanings.items() if leaning == role and name not in self.dead]

    def load_of(self, name: str) -> LoadReport:
        decoding = self.leaning_to("decode")
        num_rows = round(self.num_rows / len(decoding)) if name in decoding else 0
        return LoadReport(
            num_blocks=1000,
            num_free_blocks=1000,
            num_running=num_rows,
            num_decoding=num_rows,
            queued_prefill_tokens=int(self.queues.get(name, 0.0)),
            step_time=MODEL,
            leaning=self.leanings[name],
            counters={"step_s": self.step_s.get(name, 0.0)},
        )

    async def run(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            prefill = self.leaning_to("prefill")
            for name in prefill:
                waiting = self.queues.get(name, 0.0) + self.prompt_rate * TICK_S / len(prefill)
                done = min(waiting, TICK_S / TOKEN_S)
                self.queues[name] = waiting - done
                self.step_s[name] = self.step_s.get(name, 0.0) + done * TOKEN_S
            for name in self.leaning_to("decode"):  # what still waits there goes on elsewhere
                moved = self.queues.pop(name, 0.0)
                for other in prefill:
                    self.queues[other] = self.queues.get(other, 0.0) + moved / len(prefill)
            for control in list(self.controls.values()):
                await control.look()
            assert self.leaning_to("prefill")
            assert self.leaning_to("decode")
            self.now_s += TICK_S


def of(num_prefill: int, num_decode: int, **values: float) -> LeaningWorld:
    names = [f"w{index}" for index in range(num_prefill + num_decode)]
    leanings = {name: "prefill" if index < num_prefill else "decode" for index, name in enumerate(names)}
    return LeaningWorld(leanings=leanings, **values)  # type: ignore[arg-type]


async def test_more_prompts_and_fewer_streams_and_back_again_are_followed() -> None:
    world = of(2, 4, prompt_rate=15_000, num_rows=100)
    await world.run(60)
    assert world.changes == []

    world.prompt_rate, world.num_rows = 28_000, 50
    changed_at_s = world.now_s
    await world.run(90)
    assert len(world.leaning_to("prefill")) in (3, 4)
    assert world.changes[0][0] - changed_at_s <= 4 * EVIDENCE_S
    assert max(world.queues.values()) * TOKEN_S < 1.0

    world.prompt_rate, world.num_rows = 5_000, 140
    await world.run(150)
    assert len(world.leaning_to("decode")) >= 4
    assert world.num_rows / len(world.leaning_to("decode")) <= 45


@QUICK
@given(
    num_prefill=st.integers(1, 5),
    num_decode=st.integers(1, 5),
    prompt_rate=st.floats(0, 80_000),
    num_rows=st.integers(0, 300),
)
async def test_steady_load_comes_to_rest(num_prefill: int, num_decode: int, prompt_rate: float, num_rows: int) -> None:
    world = of(num_prefill, num_decode, prompt_rate=prompt_rate, num_rows=num_rows)

    await world.run(200)
    num_changes = len(world.changes)
    await world.run(100)

    assert len(world.changes) == num_changes < num_prefill + num_decode
    assert len({role for *_, role in world.changes}) <= 1, "no change caused the opposite one"


async def test_killed_leader_is_followed_by_the_next_router_and_none_decides_beside_it() -> None:
    world = of(1, 4, num_rows=20, num_routers=3)
    await world.run(40)
    world.prompt_rate = 12_000
    await world.run(EVIDENCE_S / 2)

    del world.controls["r0"]
    await world.run(6 * EVIDENCE_S)

    assert world.counters["r1"].num_leaning_changes == len(world.changes) == 1
    assert world.counters["r2"].num_leaning_changes == 0
    (note,) = world.notes
    assert "prefill is at" in note.reason


async def test_dead_worker_does_not_freeze_the_leanings() -> None:
    world = of(2, 3, prompt_rate=12_000, num_rows=20)
    await world.run(40)
    assert world.changes == []

    world.dead.add("w0")
    await world.run(60)

    assert len(world.leaning_to("prefill")) == 2


async def test_what_an_operator_ordered_stands_for_its_time() -> None:
    world = of(1, 2, prompt_rate=12_000, num_rows=10)
    for name in ("w1", "w2"):
        world.controls["r0"].hold(name)

    await world.run(HELD_S - TICK_S)
    assert world.changes == []
    await world.run(2 * EVIDENCE_S)

    assert len(world.changes) == 1


async def test_leaning_stays_for_a_while_and_one_of_each_is_left() -> None:
    world = of(1, 1, prompt_rate=50_000, num_rows=1)
    await world.run(100)
    assert world.changes == []

    wide = of(1, 3, prompt_rate=50_000, num_rows=1)
    await wide.run(MIN_STAY_S - TICK_S)
    assert wide.changes == [], "it has not been seen for long enough"
    await wide.run(60)
    assert len(wide.changes) == 2


async def test_worker_that_does_not_answer_changes_nothing_and_is_asked_again() -> None:
    world = of(1, 3, prompt_rate=12_000, num_rows=20)
    await world.run(MIN_STAY_S - 1)
    asked: list[str] = []

    class Deaf:
        async def lean(self, replica_id: str, role: str) -> str:
            asked.append(replica_id)
            raise WorkerUnavailableError(replica_id=replica_id, reason="no answer")

    world.controls["r0"]._orders = Deaf()
    await world.run(20)

    assert len(asked) > 1
    assert world.counters["r0"].num_leaning_changes == 0


async def test_mixed_workers_keep_their_leaning() -> None:
    world = of(1, 3, prompt_rate=40_000, num_rows=20)
    world.leanings["w9"] = "mixed"

    await world.run(120)

    assert {role for *_, role in world.changes} == {"prefill"}
    assert world.leanings["w9"] == "mixed"
