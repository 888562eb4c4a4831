"""Orders to workers over HTTP."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from tests.support.router.router_rig import FAST, router_rig


async def test_drain_reaches_the_worker_that_is_meant(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        answer = await rig.client.post("/admin/drain", json={"replica": "decode-1"})

        assert answer.json() == {"draining": "decode-1"}
        assert rig.decode.drained == ["decode-1"]
        assert rig.prefill.drained == []


@pytest.mark.parametrize(
    ("name", "problem"), [("decode", "2 workers"), ("nobody", "there is no worker"), ("", "there is no worker")]
)
async def test_drain_of_no_or_several_workers_is_refused_with_their_names(
    model_dir: Path, name: str, problem: str
) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        answer = await rig.client.post("/admin/drain", json={"replica": name})

        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "replica_not_found")
        assert error["message"].startswith(problem)
        assert "decode-0, decode-1, prefill-0" in error["message"]
        assert rig.decode.drained == []


async def test_drain_of_a_dead_worker_is_an_error(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.decode[0].is_dead = True
        answer = await rig.client.post("/admin/drain", json={"replica": "decode-0"})

        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_healthy_replica")


async def test_faults_reach_all_workers_or_one_role_or_one_worker(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        body: dict[str, Any] = {
            "faults": {"seed": 3, "read_fails": 0.2},
            "schedule": [{"fault": "bit_flips", "nth": 2}],
        }
        answer = await rig.client.post("/admin/faults", json=body)
        assert answer.json() == {"replicas": ["decode-0", "decode-1", "prefill-0"]}
        wanted = FaultOptions(seed=3, read_fails=0.2, schedule=(ScheduledFault(fault=Fault.BIT_FLIPS, nth=2),))
        assert set(rig.decode.faults.values()) == set(rig.prefill.faults.values()) == {wanted}

        told = [json.loads(entry)["text"] for entry in rig.service.live.timeline.since(0)]
        assert told[-1].startswith("all workers get injected faults: seed 3, read_fails 0.2")
        await rig.client.post("/admin/faults", json={"role": "decode"})
        assert set(rig.decode.faults.values()) == {FaultOptions()}
        assert set(rig.prefill.faults.values()) == {wanted}

        answer = await rig.client.post("/admin/faults", json={"replica": "decode-1", "faults": {"read_fails": 1}})
        assert answer.json() == {"replicas": ["decode-1"]}
        assert rig.decode.faults == {"decode-0": FaultOptions(), "decode-1": FaultOptions(read_fails=1)}
        assert set(rig.prefill.faults.values()) == {wanted}
        told = [json.loads(entry)["text"] for entry in rig.service.live.timeline.since(0)]
        assert told[-1].startswith("worker decode-1 gets injected faults: read_fails 1")


async def test_faults_of_no_worker_or_of_a_role_as_well_are_refused(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        for body, status in (({"replica": "decode"}, 404), ({"replica": "decode-1", "role": "decode"}, 400)):
            answer = await rig.client.post("/admin/faults", json={**body, "faults": {"read_fails": 1}})
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, "replica")
        assert rig.decode.faults == {}


@pytest.mark.parametrize("faults", [{"read_fails": 1.5}, {"typo": 0.1}, {"late_s": -1}])
async def test_impossible_faults_are_refused_by_name(model_dir: Path, faults: dict[str, float]) -> None:
    async with router_rig(model_dir) as rig:
        answer = await rig.client.post("/admin/faults", json={"faults": faults})

        assert answer.status_code == 400
        assert next(iter(faults)) in answer.json()["error"]["message"]
        assert rig.decode.faults == {}


async def test_faults_are_refused_where_the_cluster_allows_none(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.decode.allows_faults = False
        answer = await rig.client.post("/admin/faults", json={"faults": {"read_fails": 1}, "role": "decode"})

        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "faults_not_allowed")


async def test_orders_are_not_taken_from_just_anybody(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=dataclasses.replace(FAST, admin_api=False)) as rig:
        answer = await rig.client.post("/admin/drain", json={"replica": "decode-0"})

        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_api_closed")
        assert rig.decode.drained == []


async def test_readiness_waits_until_workers_have_met(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        assert (await rig.client.get("/ready")).status_code == 200
        rig.decode[0].num_peers = 0
        rig.service.decode_pool.note_load("decode-0", rig.decode[0].load())
        answer = await rig.client.get("/ready")

        assert answer.status_code == 503
        assert answer.json()["waits_for"] == "a decode worker that is connected to a prefill worker"
