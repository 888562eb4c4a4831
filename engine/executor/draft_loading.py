"""Loads a draft model from its settings."""

from __future__ import annotations

from engine.executor.draft_engine import DraftEngine
from engine.executor.draft_model import DraftModel
from engine.executor.draft_rows import DraftRows
from engine.runner.model_runner import ModelRunner
from engine.sampling.grammar.compiler import GrammarStore


def load_draft_model(draft_engine: DraftEngine, grammars: GrammarStore) -> DraftModel:
    """Load the model and allocate its cache, ready to draft. ``grammars``: the store that the main model uses.

    Raises:
        CheckpointError: The weights cannot be loaded.
    """
    config = draft_engine.config
    runner = ModelRunner(config, grammars=grammars)
    runner.warm_up()
    rows = DraftRows(
        max_num_seqs=config.scheduler.max_num_seqs,
        num_blocks=runner.num_blocks,
        num_groups=len(draft_engine.shape.kv_cache_groups),
        block_size=config.cache.block_size,
    )
    return DraftModel(runner, rows, max_model_len=runner.max_model_len)
