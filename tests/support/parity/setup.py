"""What the cells of the parity matrix are made of: models, connectors, and how many engines of which settings."""

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
from tests.support.router.router_rig import FAST

VOCAB_SIZE = 259
"""The byte tokenizer's: every token has a text."""

MAX_MODEL_LEN = 512
NO_CHUNKS = 256
TIER_BYTES = 8 * 1024 * 1024
PLAIN = ConnectorOptions(connector="inproc", streamed=False, checksums=True)
STREAMED = replace(PLAIN, streamed=True)
RECOMPUTES = replace(FAST, kv_lost_policy="recompute", abort_timeout_s=60.0)
"""An order is taken note of between two steps, and a cell's engines stand in one until the test lets them go."""

LOCAL = replace(RECOMPUTES, local_prefill_tokens=1000)
"""Decode workers compute all prompts."""

ELASTIC = replace(RECOMPUTES, roles="elastic")
"""Any worker takes any work, by predictions once there are some."""

BY_LEANING = replace(ELASTIC, decode_policy="queued_tokens")
"""Any worker takes any work, and the policies choose among those that lean to it: always the same ones."""

WINDOW = 33
"""Tokens that a position sees in layers with a window: a third of a prompt.

The window of the last full block's end and that of the prompt's end begin in the same block: so what decode is handed
over is all that it needs to find the prompt in its own cache.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityModel:
    """A random model: ``changes`` are fields of its configuration that are not the usual ones."""

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Make its checkpoint, with a chat template that reads all that a body can tell it."""
        make_served_checkpoint(path, self.architecture, vocab_size=VOCAB_SIZE, **self.changes)
        file = path / "tokenizer_config.json"
        config = json.loads(file.read_text())
        config["chat_template"] += "{{ tone }}{{ reasoning_effort }}{{ verbosity }}"
        config["chat_template"] += "{% if enable_thinking %}<think>{% elif tools %}<think></think>{% endif %}"
        file.write_text(json.dumps(config))
        return path


FULL = ParityModel(architecture="llama")
ALL_WINDOWED = ParityModel(architecture="mixtral", changes={"sliding_window": WINDOW})
"""And a mixture of experts in every layer."""

PARTLY_WINDOWED = ParityModel(
    architecture="qwen2",
    changes={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
)
"""Of its three layers the first sees everything: one KV cache group sees everything, and two have a window."""

TWO_ROTATIONS = ParityModel(architecture="gemma3", changes={"sliding_window": WINDOW})
"""Of its four layers the third sees everything, and is rotated otherwise than the others, which have a window."""

LATENTS = ParityModel(architecture="deepseek_v3")
"""What is cached and handed over are latents; two of its three layers have experts in groups, and shared ones."""


BY_TRANSFORMERS = ParityModel(architecture="exaone4", changes={"sliding_window": WINDOW})
"""Baton has no code for it, but layers that compute the same stand in those of transformers' code. Of its three layers
two have a window.
"""

BY_ITS_OWN_LAYERS = ParityModel(architecture="cohere2", changes={"sliding_window": WINDOW})
"""Transformers' own layers compute it: it rotates neighbouring numbers. Of its four layers one has no window."""


def suffering(faults: FaultOptions, options: ConnectorOptions = PLAIN) -> ConnectorOptions:
    """Connectors with faults on purpose."""
    return replace(options, faults=faults, allow_faults=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The engines of a cell.

    ``num_blocks``: blocks of each engine for every KV cache group.
    ``chunk_tokens``: what prefill computes a step; longer prompts are handed over meanwhile where connectors stream.
    ``steps``: what each engine of a role may do until the test lets it go on; roles that are missing run freely.
    ``tier``: where evicted blocks are kept, asked before the peers; none unless it is named.
    ``drafting``: who proposes draft tokens to one decode engine; ``is_own_draft``: the model itself does to each.
    """

    num_prefill: int = 1
    num_decode: int = 1
    num_blocks: int = 256
    chunk_tokens: int = NO_CHUNKS
    options: ConnectorOptions = PLAIN
    tier: str = ""
    settings: RouterSettings = RECOMPUTES
    scheduler: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    drafting: Callable[[], Drafting | None] | None = None
    is_own_draft: bool = False

    def connector_options(self, folder: Path) -> ConnectorOptions:
        """The options of each connector. ``folder`` is for tiers that need one."""
        if not self.tier:
            return self.options
        sizes: dict[str, Any] = {f"{self.tier}_bytes": TIER_BYTES}
        if self.tier == "disk":
            sizes["disk_path"] = str(folder)
        return replace(self.options, connector="chain", chain=(self.tier, "inproc"), **sizes)
