"""One router for all tests of a file that each leave it as they found it: building one takes longer than most tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from tests.support.router.router_rig import RouterRig, router_rig


def shared_rig(**options: Any) -> tuple[Any, Any]:
    """The fixtures ``kept`` and ``rig`` of a file whose tests run in one event loop; tests ask for ``rig``.

    It is at rest when a test begins, and its workers were asked nothing yet.
    """

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def kept(model_dir: Path) -> AsyncIterator[RouterRig]:
        async with router_rig(model_dir, **options) as rig:
            yield rig

    @pytest_asyncio.fixture(loop_scope="module")
    async def rig(kept: RouterRig) -> RouterRig:
        await kept.begin_anew()
        return kept

    return kept, rig
