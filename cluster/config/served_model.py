"""The checkpoint that is served, and its names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from cluster.config.config import BatonConfig
from engine.model.builtin import builtin_model_dir
from engine.model.weights.shards import weight_samples

DECISIVE_FILES = ("config.json", "tokenizer.json")

BUILTIN_MODEL_NAME = "baton-tiny"
BUILTIN_QUESTION = (
    "The code of the blue fox is 4827. The code of the red bear is 1356. What is the code of the blue fox?"
)
"""A question that the built-in model answers correctly only if the question's KV arrives intact."""

ANY_QUESTION = "Hello!"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The checkpoint, its name in the API, and further names under which requests may ask for it."""

    path: Path
    name: str
    aliases: tuple[str, ...] = ()

    def digest(self) -> str:
        """A digest of the files that decide about tokens: it changes when other files are put at the same path.

        Raises:
            CheckpointError, OSError: The files cannot be read.
        """
        digest = hashlib.sha256()
        for name in DECISIVE_FILES:
            file = self.path / name
            content = file.read_bytes() if file.is_file() else b""
            digest.update(len(content).to_bytes(8, "little") + content)
        for piece in weight_samples(self.path):
            digest.update(piece)
        return digest.hexdigest()[:32]

    def at(self, config: BatonConfig) -> str:
        """A text that says which model is served on which host and port."""
        return f"{self.name} on {config.host}:{config.port}"

    @property
    def example_question(self) -> str:
        """An example question for the model."""
        return BUILTIN_QUESTION if self.path == builtin_model_dir() else ANY_QUESTION


def served_model(config: BatonConfig) -> ServedModel:
    """The configured model, or the built-in one."""
    path = builtin_model_dir() if config.model is None else config.model
    names = names_of(config) or (BUILTIN_MODEL_NAME if config.model is None else path.name,)
    return ServedModel(path=path, name=names[0], aliases=names[1:])


def names_of(config: BatonConfig) -> tuple[str, ...]:
    """The configured names of the model. Answers carry the first one. Empty: the model is named after its directory."""
    names = config.served_model_name
    return (names,) if isinstance(names, str) else names or ()
