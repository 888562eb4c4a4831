"""The settings of a draft model that runs beside an engine's own model. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.contract.config import CacheConfig, EngineConfig, SpeculativeConfig
from engine.contract.errors import ConfigError
from engine.drafting.registry import most_draft_tokens
from engine.executor.draft_model import CATCH_UP_TOKENS, FEW_TOKENS
from engine.model.model_shape import ModelShape
from engine.model.registry import load_model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEngine:
    """What is known of a draft model before it is loaded: its settings and its shape."""

    config: EngineConfig
    shape: ModelShape

    @classmethod
    def of(cls, config: EngineConfig) -> DraftEngine | None:
        """The draft model of an engine with these settings; None if it has none.

        Raises:
            CheckpointError: A directory holds no checkpoint.
            ConfigError: The two vocabularies differ.
        """
        path = config.speculative.draft_model
        if path is None:
            return None
        path = path.expanduser()
        main = load_model_config(config.model.path, config.model.code)
        shape = load_model_config(path, config.model.code)
        check_vocabulary(main, shape, path=path)
        scheduler = config.scheduler
        max_model_len = min(scheduler.max_model_len or main.max_model_len, shape.max_model_len)
        block_size, num_groups = config.cache.block_size, len(shape.kv_cache_groups)
        num_tokens = min(config.speculative.draft_cache_tokens, scheduler.max_num_seqs * max_model_len)
        num_blocks = max(-(-num_tokens // block_size), -(-max_model_len // block_size), scheduler.max_num_seqs)
        few = scheduler.max_num_seqs * max(FEW_TOKENS, 1 + most_draft_tokens(config.speculative))
        return cls(
            config=EngineConfig(
                model=replace(config.model, path=path),
                cache=CacheConfig(
                    block_size=block_size, num_blocks=num_blocks * num_groups, enable_prefix_caching=False
                ),
                scheduler=replace(
                    scheduler,
                    max_model_len=max_model_len,
                    max_num_batched_tokens=max(CATCH_UP_TOKENS + few, block_size),
                    long_prefill_token_threshold=0,
                    max_num_partial_prefills=0,
                    max_long_partial_prefills=0,
                    enable_chunked_prefill=True,
                ),
                gpu=config.gpu,
                speculative=SpeculativeConfig(),
            ),
            shape=shape,
        )


def check_vocabulary(main: ModelShape, draft: ModelShape, *, path: Path) -> None:
    """Refuse a draft model whose vocabulary differs from the main model's.

    Raises:
        ConfigError: The vocabularies differ.
    """
    if draft.vocab_size != main.vocab_size:
        raise ConfigError(
            f"the draft model in {path} has a vocabulary of {draft.vocab_size} tokens, and the model one of "
            f"{main.vocab_size}: its drafts would be other tokens",
            remedy="name a draft model of the same family in speculative.draft_model",
        )
