"""Runs a scenario: first an undisturbed run, then the same requests during the faults, then the checks."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import psutil

from cluster.chaos.fault_names import words_of
from cluster.chaos.live_cluster import (
    NODE_END_S,
    PARTITION,
    LiveCluster,
    Row,
    is_whole,
    leaks_of,
    members,
    name_of,
    running_of,
)
from cluster.chaos.load import LoadRun, make_asks
from cluster.chaos.report import ChaosReport, FaultRecord, ProxyLoss, RouterLoss
from cluster.chaos.scenario import MEMBERS, TOTALS, Choice, Command, Scenario, ScenarioError, Step
from cluster.chaos.tally import Tally
from router.roles import ROLES

POLL_PERIOD_S = 0.2
TIMEOUT = httpx.Timeout(300.0, connect=10.0)
ANSWER_TIMEOUT_S = 15.0
TOKENS_TIMEOUT_S = 120.0
Tell = Callable[[str], None]


class ChaosRunner:
    """One scenario on one cluster."""

    def __init__(self, scenario: Scenario, *, url: str, headers: dict[str, str], tell: Tell) -> None:
        self._scenario = scenario
        self._url = url
        self._headers = headers
        self._tell = tell
        self._report = ChaosReport(scenario=scenario.name)
        self._tally = Tally(TOTALS)
        self._ended: set[str] = set()
        self._losses: list[RouterLoss | ProxyLoss] = []
        self._wanted: dict[str, int] = {}
        self._timers: list[asyncio.Task[None]] = []

    async def run(self) -> ChaosReport:
        """Run the whole scenario.

        Raises:
            ScenarioError: A step cannot be done here.
            httpx.HTTPError: The cluster does not answer, or refuses an order.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=TIMEOUT, limits=limits, trust_env=False
        ) as client:
            cluster = LiveCluster(client, seed=self._scenario.seed)
            self._wanted = {role: len(members(await cluster.status(), role)) for role in MEMBERS}
            section = self._scenario.load
            load = LoadRun(client, make_asks(section), num_streams=section.streams, pause_s=section.pause_s)
            if self._needs_faults:
                await cluster.set_faults({})  # so that a refusal comes now, and not after the undisturbed run
            self._tell(f"{self._scenario.name}: the run without faults")
            undisturbed = await load.once()
            await self._ask(cluster)
            started_s = time.monotonic()
            load.start()
            try:
                for _ in range(self._scenario.repeat):
                    for step in self._scenario.steps:
                        await self._do(step, cluster, load)
                        await self._note_memory(cluster)
                await load.finish()
            finally:
                await self._clean_up(cluster, load)
            self._report.duration_s = time.monotonic() - started_s
            losses = self._losses if self._scenario.checks.lost_with_router else []
            self._report.judge_answers(load.answers, undisturbed, losses=losses)
            self._report.leaks = await self._wait_for_rest(cluster)
            await self._ask(cluster)
            self._report.counted = self._tally.counted
        self._report.judge_strikes(load.answers, must_strike=self._scenario.checks.struck)
        self._check()
        return self._report

    async def _do(self, step: Step, cluster: LiveCluster, load: LoadRun) -> None:
        if step.sleep is not None:
            await asyncio.sleep(step.sleep)
        elif step.wait_for_tokens is not None:
            await self._wait_for_tokens(load, step.wait_for_tokens)
        elif step.wait_for_recovery is not None:
            await self._wait_for_recovery(cluster, timeout_s=step.wait_for_recovery)
        elif step.resume is not None:
            cluster.resume()
        elif step.heal is not None:
            await cluster.set_faults({})
        else:
            await self._break(step, cluster, load)

    async def _break(self, step: Step, cluster: LiveCluster, load: LoadRun) -> None:
        actions: dict[str, Callable[[], Awaitable[str]]] = {
            "kill": lambda: self._signal(step.kill, cluster, signal.SIGKILL),
            "stop": lambda: self._signal(step.stop, cluster, signal.SIGSTOP),
            "pause": lambda: self._pause(step, cluster),
            "drain": lambda: self._drain(step.drain, cluster),
            "replace": lambda: self._replace(step.replace or 0.0, cluster),
            "kill_node": lambda: self._kill_node(step.kill_node, cluster),
            "kill_proxy": lambda: self._kill_proxy(step.kill_proxy or 0.0, cluster, load),
            "run": lambda: self._run(step.run),
            "faults": lambda: self._faults(step.faults or {}, cluster, f"faults: {words_of(step.faults or {})}"),
            "partition": lambda: self._faults(PARTITION, cluster, "partition between the workers"),
        }
        began_s, before, num_losses = time.monotonic(), self._tally.counted, len(self._losses)
        what = await actions[step.name]()
        self._tell(f"  {what}")
        losses = self._losses[num_losses:]
        self._report.faults.append(
            FaultRecord(what=what, began_s=began_s, expects=tuple(step.expects), before=before, losses=losses)
        )

    async def _signal(self, choice: Choice | None, cluster: LiveCluster, number: signal.Signals) -> str:
        assert choice is not None
        asked_s = time.monotonic()
        rows = await cluster.choose(choice)
        for row in rows:
            cluster.signal(row, number)
        if number == signal.SIGKILL:
            self._ended |= {name_of(row) for row in rows}
        if choice.role == "router" and number == signal.SIGKILL:
            self._note_loss(rows, asked_s)
        return f"{number.name} {choice.role} {names(rows)}"

    def _note_loss(self, routers: list[Row], asked_s: float) -> None:
        if routers:
            num_open = sum(running_of(row) for row in routers)
            self._losses.append(RouterLoss(asked_s=asked_s, gone_s=time.monotonic(), num_open=num_open))

    async def _pause(self, step: Step, cluster: LiveCluster) -> str:
        assert step.pause is not None
        rows = await cluster.choose(step.pause)
        for row in rows:
            cluster.signal(row, signal.SIGSTOP)
        self._timers.append(asyncio.create_task(self._resume_later(rows, step.pause.seconds)))
        return f"SIGSTOP for {step.pause.seconds:g} s {step.pause.role} {names(rows)}"

    @staticmethod
    async def _resume_later(rows: list[Row], seconds: float) -> None:
        await asyncio.sleep(seconds)
        for row in rows:
            with contextlib.suppress(psutil.NoSuchProcess):  # replaced in the meantime
                psutil.Process(row["pid"]).send_signal(signal.SIGCONT)

    async def _drain(self, choice: Choice | None, cluster: LiveCluster) -> str:
        assert choice is not None
        rows = await cluster.choose(choice)
        for row in rows:
            await cluster.drain(row)
            self._ended.add(name_of(row))
        return f"drain {choice.role} {names(rows)}"

    async def _replace(self, timeout_s: float, cluster: LiveCluster) -> str:
        status = await self._ask(cluster)
        rows = [row for role in ROLES for row in members(status, role)]
        for row in rows:
            await cluster.drain(row)
            self._ended.add(name_of(row))
            deadline_s = time.monotonic() + timeout_s
            while not is_whole(await self._ask(cluster), self._wanted, ended=self._ended):
                if time.monotonic() > deadline_s:
                    raise ScenarioError(f"{names([row])} was not replaced within {timeout_s:g} s")
                await asyncio.sleep(POLL_PERIOD_S)
        return f"replaced {len(rows)} workers in turn"

    async def _kill_node(self, choice: Choice | None, cluster: LiveCluster) -> str:
        assert choice is not None
        rows = await cluster.choose(choice)
        asked_s = time.monotonic()
        lost = await cluster.kill_node(rows[0])
        self._ended |= {name_of(row) for row in lost}
        self._note_loss([row for row in lost if "router_id" in row], asked_s)
        return f"kill the node of {choice.role} {names(rows[:1])}"

    async def _kill_proxy(self, timeout_s: float, cluster: LiveCluster, load: LoadRun) -> str:
        proxies = await cluster.proxies()
        await self._wait_for_new_stream(load)  # requests open before may be complete, but unread
        asked_s = time.monotonic()
        load.is_proxy_away = True
        try:
            for process in proxies:
                process.kill()
            await asyncio.to_thread(psutil.wait_procs, proxies, NODE_END_S)
            while not await self._answers(cluster):
                if time.monotonic() - asked_s > timeout_s:
                    raise ScenarioError(f"the API did not answer within {timeout_s:g} s after its proxy was killed")
                await asyncio.sleep(POLL_PERIOD_S / 4)
        finally:
            load.is_proxy_away = False
        back_s = time.monotonic()
        self._losses.append(ProxyLoss(asked_s=asked_s, back_s=back_s))
        pids = ", ".join(str(process.pid) for process in proxies)
        return f"SIGKILL proxy (pid {pids}), which answers again after {back_s - asked_s:.1f} s"

    @staticmethod
    async def _answers(cluster: LiveCluster) -> bool:
        try:
            await cluster.status()
        except httpx.HTTPError:
            return False
        return True

    @staticmethod
    async def _run(command: Command | None) -> str:
        assert command is not None
        what = " ".join(command.command)
        try:
            process = await asyncio.create_subprocess_exec(
                *command.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        except (OSError, ValueError) as error:  # ValueError: a null character
            reason = error.strerror if isinstance(error, OSError) else error
            raise ScenarioError(f"`{what}` cannot be started: {reason}") from error
        try:
            output, _ = await asyncio.wait_for(process.communicate(), command.seconds)
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise ScenarioError(f"`{what}` did not end within {command.seconds:g} s") from error
        if process.returncode != 0:
            told = " ".join(output.decode(errors="replace").split())[-500:]
            raise ScenarioError(f"`{what}` ended with {process.returncode}: {told}")
        return f"run {what}"

    @staticmethod
    async def _faults(faults: dict[str, float], cluster: LiveCluster, what: str) -> str:
        await cluster.set_faults(faults)
        return what

    async def _wait_for_recovery(self, cluster: LiveCluster, *, timeout_s: float) -> None:
        """Return when every role has all its members again, and all of them take requests."""
        deadline_s = time.monotonic() + timeout_s
        while not is_whole(await self._ask(cluster), self._wanted, ended=self._ended):
            if time.monotonic() > deadline_s:
                self._report.problems.append(f"the cluster did not recover within {timeout_s:g} s")
                return
            await asyncio.sleep(POLL_PERIOD_S)
        now = time.monotonic()
        for fault in self._report.faults:
            if fault.whole_s is None:
                fault.whole_s = now - fault.began_s

    async def _wait_for_rest(self, cluster: LiveCluster) -> list[str]:
        deadline_s = time.monotonic() + self._scenario.checks.rest_timeout_s
        while leaks := leaks_of(await self._ask(cluster)):
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(POLL_PERIOD_S)
        return leaks

    async def _ask(self, cluster: LiveCluster) -> dict[str, Any]:
        """The status, with retries if the asked router was just killed. Its totals are added to the tally."""
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                status = await cluster.status()
                self._tally.note(status)
                return status
            except httpx.HTTPError:
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(POLL_PERIOD_S)

    @staticmethod
    async def _wait_for_tokens(load: LoadRun, num_tokens: int) -> None:
        wanted = load.num_tokens + num_tokens
        deadline_s = time.monotonic() + TOKENS_TIMEOUT_S
        while load.num_tokens < wanted:
            if time.monotonic() > deadline_s:
                raise ScenarioError(f"the streams did not get {num_tokens} tokens within {TOKENS_TIMEOUT_S:g} s")
            await asyncio.sleep(POLL_PERIOD_S / 4)

    @staticmethod
    async def _wait_for_new_stream(load: LoadRun) -> None:
        """Wait until a request that is sent from now on has its first token."""
        now_s = time.monotonic()
        while load.newest_begun_s < now_s:
            if time.monotonic() > now_s + TOKENS_TIMEOUT_S:
                raise ScenarioError(f"no request began and got a token within {TOKENS_TIMEOUT_S:g} s")
            await asyncio.sleep(POLL_PERIOD_S / 10)

    async def _clean_up(self, cluster: LiveCluster, load: LoadRun) -> None:
        """Resume stopped processes, remove all faults, and cancel all streams."""
        for timer in self._timers:
            if not timer.done():
                timer.cancel()
        cluster.resume()
        await load.cancel()
        if self._needs_faults:
            with contextlib.suppress(httpx.HTTPError, ScenarioError):
                await cluster.set_faults({})

    @property
    def _needs_faults(self) -> bool:
        return any(step.needs_faults for step in self._scenario.steps)

    async def _note_memory(self, cluster: LiveCluster) -> None:
        status = await self._ask(cluster)
        for role in MEMBERS:
            for row in members(status, role):
                with contextlib.suppress(psutil.NoSuchProcess):
                    size = psutil.Process(row["pid"]).memory_info().rss
                    self._report.memory_bytes.setdefault(f"{role} {row['pid']}", []).append(size)

    def _check(self) -> None:
        checks, report = self._scenario.checks, self._report
        if report.num_lost > checks.lost:
            report.problems.append(f"{report.num_lost} requests were lost: {'; '.join(report.errors[:3])}")
        if report.num_wrong > checks.wrong:
            report.problems.append(f"{report.num_wrong} answers differ from the run without faults")
        if report.leaks and not checks.leaks:
            report.problems.append(f"KV blocks are held although nothing runs: {'; '.join(report.leaks)}")
        if not checks.recomputed and report.counted["recomputed_tokens"]:
            report.problems.append(f"{report.counted['recomputed_tokens']:g} tokens were computed again")
        if checks.max_pause_s is not None and report.longest_pause_s > checks.max_pause_s:
            report.problems.append(f"a stream was silent for {report.longest_pause_s:.1f} s")


def names(rows: list[Row]) -> str:
    """A readable text of the processes."""
    return ", ".join(f"{name_of(row)} (pid {row['pid']})" for row in rows)
