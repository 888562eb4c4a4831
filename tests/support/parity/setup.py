"""Parts of the cells of the parity matrix: models, connectors, and engines with their settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.drafting.proposer import Drafting
from kv_transfer.fault_options import FaultOptions
from kv_transfer.options import ConnectorOptions
from router.settings import RouterSettings
from tests.support.cluster.served_checkpoint import make_served_checkpoint
from tests.support.kv.tier_options import tier_options
from tests.support.router.router_rig import FAST

VOCAB_SIZE = 259
"""The size of the byte tokenizer's vocabulary: every token has a text."""

MAX_MODEL_LEN = 512
NO_CHUNKS = 256
TIER_BYTES = 8 * 1024 * 1024
PLAIN = ConnectorOptions(connector="inproc", streamed=False, checksums=True)
STREAMED = replace(PLAIN, streamed=True)
RECOMPUTES = replace(FAST, kv_lost_policy="recompute", abort_timeout_s=60.0)
"""Workers only notice orders between two steps, and a cell's engines stay inside one until the test lets them continue.
"""

LOCAL = replace(RECOMPUTES, local_prefill_tokens=1000)
"""Decode workers compute all prompts."""

ELASTIC = replace(RECOMPUTES, roles="elastic")
"""Any worker takes any work, placed by predictions once these exist."""

BY_LEANING = replace(ELASTIC, decode_policy="queued_tokens")
"""Any worker takes any work, placed by policies among those that lean to it, so that it always goes to the same ones.
"""

WINDOW = 33
"""Tokens that a position sees in layers with a window: a third of a prompt.

The window of the last full block's end and that of the prompt's end begin in the same block: so what decode is handed
over is all that it needs to find the prompt in its own cache.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityModel:
    """A random model; ``changes`` are the fields of its configuration that differ from the usual ones."""

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Write its checkpoint, with a chat template that reads every parameter that a body can have."""
        make_served_checkpoint(path, self.architecture, vocab_size=VOCAB_SIZE, **self.changes)
        file = path / "tokenizer_config.json"
        config = json.loads(file.read_text())
        config["chat_template"] += "{{ tone }}{{ reasoning_effort }}{{ verbosity }}"
        config["chat_template"] += "{% if enable_thinking %}<think>{% elif tools %}<think></think>{% endif %}"
        file.write_text(json.dumps(config))
        return path


FULL = ParityModel(architecture="llama")
ALL_WINDOWED = ParityModel(architecture="mixtral", changes={"sliding_window": WINDOW})
"""All layers have a window and a mixture of experts."""

PARTLY_WINDOWED = ParityModel(
    architecture="qwen2",
    changes={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
)
"""The first of its three layers has no window: one KV cache group without a window, and two with one."""

TWO_ROTATIONS = ParityModel(architecture="gemma3", changes={"sliding_window": WINDOW})
"""The third of its four layers has no window and another rotation than the others, which have a window."""

ONE_SCALED_ROTATION = ParityModel(architecture="olmo3", changes={"sliding_window": WINDOW})
"""Of its four layers the fourth sees everything, and only its rotation is scaled; queries and keys are normalised over
all heads.
"""

LATENTS = ParityModel(architecture="deepseek_v3")
"""It caches and hands over latents; two of its three layers have experts in groups, and shared experts."""


BY_TRANSFORMERS = ParityModel(architecture="exaone4", changes={"sliding_window": WINDOW})
"""It runs with transformers' code, in which Baton's layers that compute the same replace the model's own. Two of its
three layers have a window.
"""

BY_ITS_OWN_LAYERS = ParityModel(architecture="cohere2", changes={"sliding_window": WINDOW})
"""It runs with transformers' own layers, because it rotates neighbouring numbers. One of its four layers has no window.
"""


def suffering(faults: FaultOptions, options: ConnectorOptions = PLAIN) -> ConnectorOptions:
    """Connector options with injected faults."""
    return replace(options, faults=faults, allow_faults=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The engines of a cell. Without mixed ones there is no pool for them.

    ``num_blocks``: blocks of each engine for every KV cache group.
    ``chunk_tokens``: what prefill computes a step; longer prompts are handed over meanwhile where connectors stream.
    ``steps``: what each engine of a role may do until the test lets it go on; roles that are missing run freely.
    ``tier``: where evicted blocks are kept, asked before the peers; none unless it is named.
    ``drafting``: who proposes draft tokens to one decode engine; ``is_own_draft``: the model itself does to each.
    """

    num_prefill: int = 1
    num_decode: int = 1
    num_mixed: int = 0
    num_blocks: int = 256
    chunk_tokens: int = NO_CHUNKS
    options: ConnectorOptions = PLAIN
    tier: str = ""
    settings: RouterSettings = RECOMPUTES
    scheduler: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    drafting: Callable[[], Drafting | None] | None = None
    is_own_draft: bool = False

    @property
    def num_engines(self) -> dict[str, int]:
        """How many there are of each role."""
        numbers = {"prefill": self.num_prefill, "decode": self.num_decode}
        return {**numbers, "mixed": self.num_mixed} if self.num_mixed else numbers

    def connector_options(self, folder: Path) -> ConnectorOptions:
        """The options of each connector. ``folder`` is for tiers that need one."""
        if not self.tier:
            return self.options
        sizes = tier_options([self.tier], num_bytes=TIER_BYTES, folder=folder)
        return replace(self.options, connector="chain", chain=(self.tier, "inproc"), **sizes)
