"""An answer as a sequence of blocks: thinking, text, and one for each tool call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from router.request.text_output import TextOutput, TextPiece
from router.text.logprob_trail import TokenEntry
from router.tools.turn import CallArguments, CallBegin, ContentText, ReasoningText, TurnPart

BlockKind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass(slots=True, kw_only=True)
class Block:
    """One block as far as it was generated. A call's text is its arguments, as JSON."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    is_complete: bool = False

    @property
    def text(self) -> str:
        """The block's whole text."""
        return "".join(self.texts)


class BlockStep(NamedTuple):
    """A step of a block: it opens, it grows by a text with its tokens' log-probabilities, or it closes."""

    kind: Literal["open", "more", "close"]
    block: Block
    text: str = ""
    entries: tuple[TokenEntry, ...] = ()


class TurnBlocks:
    """Splits an output's pieces into blocks."""

    def __init__(self, output: TextOutput) -> None:
        self._output = output
        self._entries: list[TokenEntry] = []
        self.blocks: list[Block] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of thinking tokens so far."""
        turn = self._output.turn
        return 0 if turn is None else turn.num_reasoning_tokens

    @property
    def calls_tools(self) -> bool:
        """True if there is a tool call."""
        return any(block.kind == "call" for block in self.blocks)

    def take(self, piece: TextPiece) -> Iterator[BlockStep]:
        """The steps for a piece. The last piece closes the open block; at least one block exists then."""
        is_all_content = self._output.turn is None
        parts: Sequence[TurnPart] = (
            piece.parts if not is_all_content else (ContentText(piece.text),) if piece.text else ()
        )
        self._entries += piece.entries if is_all_content else piece.content_entries
        for part in parts:
            yield from self._add(part)
        if piece.finish_reason is not None:
            if not self.blocks:
                yield self._open("text")
            if self._entries and self.blocks[-1].kind == "text":
                yield self._more("")
            yield from self.close(is_complete=piece.finish_reason != "length")

    def close(self, *, is_complete: bool) -> Iterator[BlockStep]:
        """End the block that is open, if one is."""
        if self.blocks and not self.blocks[-1].is_complete:
            self.blocks[-1].is_complete = is_complete
            yield BlockStep("close", self.blocks[-1])

    def _add(self, part: TurnPart) -> Iterator[BlockStep]:
        match part:
            case CallBegin(_, call_id, name):
                yield from self.close(is_complete=True)
                yield self._open("call", call_id=call_id, name=name)
            case CallArguments(_, text):
                yield self._more(text)
            case ReasoningText(text) | ContentText(text):
                kind: BlockKind = "reasoning" if isinstance(part, ReasoningText) else "text"
                if not self.blocks or self.blocks[-1].kind != kind:
                    yield from self.close(is_complete=True)
                    yield self._open(kind)
                yield self._more(text)

    def _open(self, kind: BlockKind, *, call_id: str = "", name: str = "") -> BlockStep:
        self.blocks.append(Block(index=len(self.blocks), kind=kind, call_id=call_id, name=name))
        return BlockStep("open", self.blocks[-1])

    def _more(self, text: str) -> BlockStep:
        block = self.blocks[-1]
        entries: tuple[TokenEntry, ...] = ()
        if block.kind == "text":
            entries, self._entries = tuple(self._entries), []
            block.entries.extend(entries)
        block.texts.append(text)
        return BlockStep("more", block, text, entries)
