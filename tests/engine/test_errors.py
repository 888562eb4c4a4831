"""Errors that workers tell routers and each other."""

from __future__ import annotations

import pickle

import pytest

from engine.contract.errors import (
    ConfigError,
    EngineStalledError,
    OutOfBlocksError,
    PromptTooLongError,
    RequestRefusedError,
)
from kv_transfer.errors import HandshakeRefusedError, PeerUnreachableError, PortableError
from kv_transfer.transport import TransportError

ERRORS = (
    ConfigError("two things differ", remedy="make them one"),
    EngineStalledError(busy_s=31.0, step_timeout_s=30.0),
    OutOfBlocksError(requested=3, free=2),
    PromptTooLongError(num_prompt_tokens=9, max_prompt_tokens=8, why="the model ends there"),
    RequestRefusedError("no", code="never"),
    HandshakeRefusedError(what="block_size", ours=16, theirs=32),
    PeerUnreachableError(engine_id="a", reason="it is gone"),
    TransportError(peer="a", reason="it was closed"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_in_another_process_as_it_is(error: PortableError) -> None:
    received = pickle.loads(pickle.dumps(error))

    assert type(received) is type(error)
    assert str(received) == str(error)
    assert vars(received) == vars(error)
