"""Batches of chats of one length each, drawn from the seed and the number of the step."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from .conversation import Kind, conversation, plain_text
from .messages import Message, Role
from .split import Split
from .tokenizer import BEGIN, END, PAD, ROLE_TOKENS, token_id

LENGTHS = (128, 256, 512, 1024)
PLAIN_SHARE = 0.02
PROMPT_WEIGHT = 0.05
# Digits, and where to stop, are the tokens that have to be worked out; the rest of an answer follows easily.
# So are those of calls and JSON, where a word has other tokens than in the text that it is taken from.
HARD_WEIGHT = 3.0
_JSON_BEGINNINGS = ("<tool_call>", "{", "[")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs and what should follow them, both [num_chats, length], with the weight of each target in the loss."""

    token_ids: Tensor
    targets: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What chats are like from ``start``, a share of the training, on: of which lengths, and of which kinds.

    ``copy_share`` of the chats only copy, ``tools_share`` have tools, ``fields_share`` fill schemas.
    """

    start: float
    length_shares: tuple[float, ...]
    copy_share: float
    tools_share: float = 0.0
    fields_share: float = 0.0


# Copying is learned first, on short chats; recall grows out of it, and then over longer distances.
FIRST_CURRICULUM = (
    Stage(start=0.0, length_shares=(0.7, 0.3, 0.0, 0.0), copy_share=0.3),
    Stage(start=0.25, length_shares=(0.6, 0.4, 0.0, 0.0), copy_share=0.08),
    Stage(start=0.5, length_shares=(0.35, 0.35, 0.3, 0.0), copy_share=0.05),
    Stage(start=0.65, length_shares=(0.25, 0.25, 0.35, 0.15), copy_share=0.02),
)
# Calls and schemas are learned by a model that can copy, amid what it can already do.
SECOND_CURRICULUM = (
    Stage(start=0.0, length_shares=(0.15, 0.35, 0.35, 0.15), copy_share=0.02, tools_share=0.3, fields_share=0.25),
)
_RECALL_SHARE = {128: 0.6, 256: 0.75, 512: 0.85, 1024: 0.9}


class ChatEncoder:
    """Turns chats into token ids and weights."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.pad_id = token_id(tokenizer, PAD)
        self._begin_id, self._end_id = token_id(tokenizer, BEGIN), token_id(tokenizer, END)
        self._digit_ids = {token for text, token in tokenizer.get_vocab().items() if text[-1:].isdigit()}
        self._role_ids = {role: token_id(tokenizer, token) for role, token in ROLE_TOKENS.items()}

    def chat(
        self, rng: Random, split: Split, length: int, stage: Stage
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """``length`` + 1 tokens of one chat with their weights, the rest padded with weight 0."""
        token_ids, weights = [self._begin_id], [0.0]
        if rng.random() < PLAIN_SHARE:
            token_ids += self._tokenizer.encode(plain_text(rng)).ids
            weights += [1.0] * (len(token_ids) - 1)
            return self._fit(token_ids, weights, length)
        kind = _kind(rng, length, stage)
        for message in conversation(rng, split, kind, length):
            ids = self._tokenizer.encode(message.text).ids
            token_ids += [self._role_ids[message.role], *ids, self._end_id]
            weights += [0.0, *self._weights(message, ids)]
            if len(token_ids) > length:
                break
        return self._fit(token_ids, weights, length)

    def _weights(self, message: Message, token_ids: list[int]) -> list[float]:
        """The weight of each token of a turn, and of its end."""
        if message.role is not Role.ASSISTANT:
            return [*[PROMPT_WEIGHT] * len(token_ids), 0.0]
        if message.text.startswith(_JSON_BEGINNINGS):
            return [HARD_WEIGHT] * (len(token_ids) + 1)
        return [*(HARD_WEIGHT if token in self._digit_ids else 1.0 for token in token_ids), HARD_WEIGHT]

    def _fit(
        self, token_ids: list[int], weights: list[float], length: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        padding = max(length + 1 - len(token_ids), 0)
        ids = [*token_ids[: length + 1], *[self.pad_id] * padding]
        return np.array(ids), np.array([*weights[: length + 1], *[0.0] * padding], dtype=np.float32)

    def batch(self, rng: Random, split: Split, *, length: int, num_tokens: int, stage: Stage) -> Batch:
        """``num_tokens`` in chats of ``length`` each."""
        chats = [self.chat(rng, split, length, stage) for _ in range(num_tokens // length)]
        ids = torch.from_numpy(np.stack([ids for ids, _ in chats]))
        weights = torch.from_numpy(np.stack([weights for _, weights in chats]))
        return Batch(
            token_ids=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous(), weights=weights[:, 1:].contiguous()
        )


def training_batch(
    encoder: ChatEncoder, curriculum: Sequence[Stage], *, seed: int, step: int, progress: float, num_tokens: int
) -> Batch:
    """The batch of a step: the same for the same curriculum, seed, step and progress (the share of training done)."""
    rng = Random(f"train/{seed}/{step}")
    stage = max((stage for stage in curriculum if stage.start <= progress), key=lambda stage: stage.start)
    (length,) = rng.choices(LENGTHS, weights=stage.length_shares)
    return encoder.batch(rng, Split.TRAIN, length=length, num_tokens=num_tokens, stage=stage)


def _kind(rng: Random, length: int, stage: Stage) -> Kind:
    kind = rng.random()
    for chosen, share in (
        (Kind.COPY, stage.copy_share),
        (Kind.TOOLS, stage.tools_share),
        (Kind.FIELDS, stage.fields_share),
    ):
        if kind < share:
            return chosen
        kind -= share
    return Kind.RECALL if rng.random() < _RECALL_SHARE[length] else Kind.MIXED
