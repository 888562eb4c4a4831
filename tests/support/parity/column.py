"""One column of the parity matrix."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.parity.answers import Answer
from tests.support.parity.feature import Feature
from tests.support.parity.setup import Setup
from tests.support.parity.world import World
from tests.support.parity.worlds import Worlds

Ask = Callable[[World, Feature], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A path on which an answer is generated, or a fault on that path.

    It says for itself that its path was taken or its fault was suffered, by counters as ``World.count`` names them: an
    answer that is right because nothing happened proves nothing.

    ``ask``: how a row's request is asked, where more happens than that.
    ``grow``: counters that must have grown. ``stay``: counters that must not.
    ``grow_with_caches``: counters that must have grown unless the row's prompts are read from no cache; then, must not.
    ``grow_without_beams``: counters that must have grown unless the row is a beam search, which has no drafts and whose
    steps wait for each other.
    ``is_left_whole``: the next row may be asked in the same world.
    """

    name: str
    setup: Setup
    ask: Ask = World.ask
    grow: tuple[str, ...] = ()
    stay: tuple[str, ...] = ()
    grow_with_caches: tuple[str, ...] = ()
    grow_without_beams: tuple[str, ...] = ()
    is_left_whole: bool = True

    async def answer(self, worlds: Worlds, model: Path, feature: Feature) -> Answer:
        """The answer to a row's request on this path."""
        async with worlds.cell(model, self.setup, is_left_whole=self.is_left_whole) as made:
            answer = await self.ask(made, feature)
            await made.rest()  # of what happened while a request runs, engines tell only now and then
            for counter in self.grow:
                assert made.count(counter) > 0, counter
            for counter in self.stay:
                assert made.count(counter) == 0, counter
            for counter in self.grow_with_caches:
                assert (made.count(counter) > 0) == (not feature.is_computed_anew), counter
            for counter in self.grow_without_beams:
                assert made.count(counter) > 0 or feature.is_beam_search, counter
            return answer
