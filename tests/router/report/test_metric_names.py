"""The names of `/metrics`, which dashboards are built on: they change only together with the file beside this one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from router.service import RouterService
from tests.support.engine.engine_pools import engine_pools
from tests.support.router.router_rig import FAST, until

NAMES = Path(__file__).with_name("metric_names.txt")


async def test_names_kinds_and_texts_of_metrics_are_those_that_were_told_before(model_dir: Path) -> None:
    settings = dataclasses.replace(FAST, metrics_compat="vllm")
    async with engine_pools() as (prefill, decode):
        service = RouterService(model_dir, "tiny", {"prefill": prefill, "decode": decode}, settings)
        await service.start()
        try:
            await until(lambda: service.prefill_pool.has_introduced() and service.decode_pool.has_introduced())
            text = (await service.view.metrics_text()).decode()
            status = await service.view.status()
        finally:
            await service.close()
    told = sorted(line for line in text.splitlines() if line.startswith("#"))
    totals = status["totals"]
    assert isinstance(totals, dict)
    told += [f"/status {name}" for name in sorted(set(totals) - {"counters"})]

    assert told == NAMES.read_text().splitlines()
