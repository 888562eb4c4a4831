"""Settings by the keys that they have in a configuration file, in messages of rooms that know no file."""

from __future__ import annotations

import re

from cluster.config.config_section import Section


def with_keys(message: str, *places: tuple[str, Section]) -> str:
    """The message with whole keys: ``max_num_seqs`` becomes ``decode.scheduler.max_num_seqs`` where that decides.

    ``places`` are sections with their keys, those that win first. A setting that is given nowhere stands in the last
    one that has it. Names without an underscore are words, too: only one that the message begins with, as in
    ``chain: ...``, is a key.
    """
    everywhere = {name: f"{key}.{name}" for key, section in places for name in type(section).model_fields}
    given = {name: f"{key}.{name}" for key, section in reversed(places) for name in section.model_fields_set}
    keys = {**everywhere, **given}
    return re.sub(r"^\w+(?=[:.])|(?<![\w.])\w*_\w*", lambda found: keys.get(found[0], found[0]), message)
