"""Settings by the keys that they have in a configuration file, in messages of rooms that know no file."""

from __future__ import annotations

import re

from cluster.config.config_section import Section


def with_keys(message: str, *places: tuple[str, Section]) -> str:
    """The message with whole keys: ``max_num_seqs`` becomes ``decode.scheduler.max_num_seqs`` where that decides.

    ``places`` are sections with their keys, those that win first. A setting that is given nowhere stands in the last
    one that has it.
    """
    everywhere = {name: f"{key}.{name}" for key, section in places for name in type(section).model_fields}
    given = {name: f"{key}.{name}" for key, section in reversed(places) for name in section.model_fields_set}
    keys = {name: key for name, key in {**everywhere, **given}.items() if "_" in name}  # others are words, too
    return re.sub(rf"(?<![\w.])({'|'.join(keys)})(?!\w)", lambda found: keys[found[1]], message)
