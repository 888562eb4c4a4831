"""Refusals cross processes as values."""

from __future__ import annotations

import pickle

from cluster.serve.refusal import HandshakeRefusal, Refusal
from engine.contract.errors import PromptTooLongError
from kv_transfer.errors import HandshakeRefusedError


def test_refused_request_keeps_code_and_message() -> None:
    error = PromptTooLongError(num_prompt_tokens=9, max_prompt_tokens=8, why="the model ends there")

    received: Refusal = pickle.loads(pickle.dumps(Refusal.of(error)))

    assert (received.to_error().code, str(received.to_error())) == ("prompt_too_long", str(error))


def test_refused_handshake_is_told_from_the_other_side() -> None:
    error = HandshakeRefusedError(what="dtype", ours="float32", theirs="bfloat16")

    received: HandshakeRefusal = pickle.loads(pickle.dumps(HandshakeRefusal.of(error)))

    assert (received.to_error().ours, received.to_error().theirs) == ("bfloat16", "float32")
