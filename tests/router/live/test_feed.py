"""The events for watchers of a cluster: snapshots, changes, and timeline entries."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from engine.contract.role import Work
from router.errors import TooManyWatchersError
from router.live.feed import MAX_WATCHERS, LiveFeed
from router.live.merge_patch import apply_patch
from router.live.sampler import Sampler
from router.live.timeline import MAX_ENTRIES, Happening, Timeline
from router.security import SecuritySettings, hash_key, new_key
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import RouterRig, router_rig, until

OWNERS = ("running", "leased", "loading", "early", "cached", "free")


class Watcher:
    """Reads a stream and keeps what it says."""

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        self._frames = frames
        self.names: list[str] = []
        self.state: dict[str, Any] = {}
        self.timeline: list[dict[str, Any]] = []

    async def read(self) -> list[str]:
        """The names of the events that come next."""
        names = []
        for text in (await anext(self._frames)).decode().split("\n\n")[:-1]:
            name, data = text.removeprefix("event: ").split("\ndata: ")
            self._take(name, json.loads(data))
            names.append(name)
        self.names += names
        return names

    def _take(self, name: str, told: dict[str, Any]) -> None:
        if name == "snapshot":
            self.state, self.timeline = told["state"], told["timeline"]
        elif name == "delta":
            self.state = apply_patch(self.state, told["patch"])
        else:
            self.timeline.append(told)

    def kinds(self) -> list[str]:
        """The kinds of the entries so far."""
        return [entry["kind"] for entry in self.timeline]


@asynccontextmanager
async def watching(feed: LiveFeed) -> AsyncIterator[Watcher]:
    frames: AsyncGenerator[bytes, None] = feed.watch()
    async with aclosing(frames):
        watcher = Watcher(frames)
        await watcher.read()
        yield watcher


async def change(rig: RouterRig, watcher: Watcher) -> list[str]:
    rig.service.live.look()
    return await watcher.read()


async def test_first_comes_the_whole_state(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2) as rig, watching(rig.service.live) as watcher:
        assert watcher.names == ["snapshot"]
        assert set(watcher.state["workers"]) == {"prefill-0", "prefill-1", "decode-0"}
        assert watcher.state["model"] == "tiny"
        worker = watcher.state["workers"]["decode-0"]
        assert (worker["role"], worker["leaning"], worker["state"]) == ("decode", "decode", "running")


async def test_what_a_worker_keeps_to_is_told_while_the_work_is_divided(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig, watching(rig.service.live) as watcher:
        (replica,) = rig.service.decode_pool.replicas
        assert "keeps_to" not in watcher.state["workers"]["decode-0"]

        replica.keep_to(Work.STREAM)
        await change(rig, watcher)
        assert watcher.state["workers"]["decode-0"]["keeps_to"] == "stream"

        replica.keep_to(None)
        await change(rig, watcher)
        assert "keeps_to" not in watcher.state["workers"]["decode-0"]


async def test_blocks_by_owner_add_up(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.decode[0].gauges = {
            "num_free_blocks": 700,
            "num_held_blocks": 250,
            "num_leased_blocks": 50,
            "num_early_blocks": 20,
            "num_loading_blocks": 30,
            "num_cached_blocks": 400,
        }
        await until(lambda: rig.service.decode_pool.replicas[0].load.num_leased_blocks == 50)
        async with watching(rig.service.live) as watcher:
            kv = watcher.state["workers"]["decode-0"]["kv"]

            assert {name: kv[name] for name in OWNERS} == {
                "running": 200,
                "leased": 50,
                "loading": 30,
                "early": 20,
                "cached": 400,
                "free": 300,
            }
            assert kv["total"] == sum(kv[name] for name in OWNERS)


async def test_then_come_changes_that_lead_to_the_state(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig, watching(rig.service.live) as watcher:
        await rig.complete([5] * 7, max_tokens=5, ignore_eos=True)
        rig.decode.add("decode-9")
        await until(lambda: rig.service.decode_pool.get("decode-9") is not None)
        names = await change(rig, watcher)

        assert names[0] == "delta"
        assert watcher.state["totals"]["requests"] == 1
        assert "decode-9" in watcher.state["workers"]
        async with watching(rig.service.live) as other:
            assert other.state == watcher.state


async def test_worker_that_comes_and_goes_stands_in_the_timeline(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2) as rig, watching(rig.service.live) as watcher:
        rig.decode[1].is_dead = True
        rig.decode.kill("decode-1")
        await until(lambda: any(item.is_left_out for item in rig.service.decode_pool.replicas))
        await change(rig, watcher)
        rig.decode.hidden.add("decode-1")
        await until(lambda: rig.service.decode_pool.get("decode-1") is None)
        await change(rig, watcher)

        told = [(entry["kind"], entry["replica"]) for entry in watcher.timeline if "replica" in entry]
        assert ("worker_left_out", "decode-1") in told
        assert ("worker_gone", "decode-1") in told
        assert "decode-1" not in watcher.state["workers"]


async def test_timeline_is_kept_while_nobody_watches(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.service.live.look()
        rig.decode.add("decode-9")
        await until(
            lambda: any(item.replica_id == "decode-9" and item.info for item in rig.service.decode_pool.replicas)
        )
        rig.service.live.look()

        assert not rig.service.live.is_sampling
        async with watching(rig.service.live) as watcher:
            assert "worker_up" in watcher.kinds()


async def test_slow_reader_gets_the_state_anew(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig, watching(rig.service.live) as watcher:
        rig.service.live.look()
        rig.service.live.look()

        assert await watcher.read() == ["snapshot"]
        assert (await change(rig, watcher))[0] == "delta"


async def test_one_task_samples_for_all_and_ends_with_the_last(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        live = rig.service.live
        assert not live.is_sampling
        async with watching(live), watching(live):
            assert (live.is_sampling, live.num_watchers) == (True, 2)

        assert (live.is_sampling, live.num_watchers) == (False, 0)


async def test_too_many_watchers_are_refused(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        streams = [rig.service.live.watch() for _ in range(MAX_WATCHERS)]
        for stream in streams:
            await anext(stream)
        refused = await rig.client.get("/admin/events")
        with pytest.raises(TooManyWatchersError):
            await anext(rig.service.live.watch())
        for stream in streams:
            await stream.aclose()

        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_watchers")


async def test_watchers_whose_first_sample_fails_keep_no_place() -> None:
    feed = LiveFeed(cast(Sampler, SimpleNamespace(sample=lambda: 1 / 0)))
    for _ in range(MAX_WATCHERS + 1):
        with pytest.raises(ZeroDivisionError):
            await anext(feed.watch())

    assert (feed.num_watchers, feed.is_sampling) == (0, False)


async def test_streams_end_with_the_router(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        frames = rig.service.live.watch()
        await anext(frames)
        rig.app.state.end_watching()

        assert [frame async for frame in frames] == []


def test_timeline_keeps_the_newest_entries_only() -> None:
    timeline = Timeline()
    for number in range(MAX_ENTRIES + 10):
        timeline.add(Happening(kind="drain", text=str(number)), at_unix_s=number)

    kept = [json.loads(text)["number"] for text in timeline.since(0)]
    assert kept == list(range(11, MAX_ENTRIES + 11))
    assert timeline.since(timeline.last_number) == ()


async def test_stream_over_http_ends_sampling_when_its_client_leaves(model_dir: Path) -> None:
    async with (
        router_rig(model_dir) as rig,
        live_app(rig.app) as url,
        httpx.AsyncClient(timeout=60.0, trust_env=False) as client,
    ):
        async with client.stream("GET", f"{url}/admin/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            assert await anext(lines) == "event: snapshot"
            assert rig.service.live.is_sampling
        await until(lambda: not rig.service.live.is_sampling)


async def test_head_of_the_stream_ends(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        response = await rig.client.head("/admin/events")

        assert (response.status_code, response.content) == (200, b"")
        assert not rig.service.live.is_sampling


@pytest.mark.parametrize(("rank", "status"), [("none", 401), ("user", 403), ("admin", 200)])
async def test_stream_asks_for_an_admin_key_where_there_are_keys(model_dir: Path, rank: str, status: int) -> None:
    user, admin = new_key(), new_key()
    security = SecuritySettings(api_keys=(hash_key(user),), admin_keys=(hash_key(admin),))
    headers = {"none": {}, "user": {"Authorization": f"Bearer {user}"}, "admin": {"Authorization": f"Bearer {admin}"}}
    async with router_rig(model_dir, security=security) as rig:
        response = await rig.client.head("/admin/events", headers=headers[rank])

        assert response.status_code == status


async def test_stream_is_open_where_the_only_key_is_the_clusters_own(model_dir: Path) -> None:
    security = SecuritySettings(own_admin_key=hash_key(new_key()))
    async with router_rig(model_dir, security=security) as rig:
        assert (await rig.client.head("/admin/events")).status_code == 200
        assert (await rig.client.post("/admin/drain", json={"replica": "x"})).status_code == 401
