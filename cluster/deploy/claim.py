"""Claims on the cluster of a shared Ray: one command works on it at a time, and the others can see which one.

A claim lives as long as its command's connection to Ray. So a command that was killed holds no claim.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from cluster.config.names import NAMESPACE

PREFIX = "claim:"
NUMBER_DIGITS = 12
MAX_ATTEMPTS = 10

SERVE = "baton serve"
DEPLOY = "baton deploy"

LivingJobs = Callable[[], Collection[str]]
"""The ids of the drivers that are connected to Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A command and what it runs, as shown to users. ``job_id`` is Ray's id for the command's connection."""

    command: str
    what: str
    user: str
    host: str
    pid: str
    since: str
    job_id: str

    @classmethod
    def of_this_process(cls, command: str, *, what: str, job_id: str) -> Self:
        """A new claim of this process."""
        return cls(
            command=command,
            what=what,
            user=_user(),
            host=socket.gethostname(),
            pid=str(os.getpid()),
            since=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            job_id=job_id,
        )

    @classmethod
    def of_values(cls, values: Mapping[str, object]) -> Self:
        """The claim with these fields, which ``dataclasses.asdict`` or another version of Baton wrote."""
        return cls(**{item.name: str(values.get(item.name, "?")) for item in dataclasses.fields(cls)})

    def __str__(self) -> str:
        return f"{self.what}, of the `{self.command}` that {self.user} started on {self.host} at {self.since}"


class ClaimedError(Exception):
    """Another command works on the cluster."""

    def __init__(self, holder: Claim) -> None:
        super().__init__(str(holder))
        self.holder = holder


def take_claim(claim: Claim, living_jobs: LivingJobs) -> int:
    """Claim the cluster; returns the number of the claim, for ``give_back``.

    Claims are numbered, and the highest one counts. If several commands ask for the same number at once, Ray's store
    gives it to only one of them. A command whose number is no longer the highest tries the next number.

    Raises:
        ClaimedError: A command that is still connected holds the claim.
    """
    holder = claim
    for _ in range(MAX_ATTEMPTS):
        number, latest = _latest()
        if latest is not None and latest.job_id in living_jobs():
            raise ClaimedError(latest)
        mine = number + 1
        if _put(mine, dataclasses.asdict(claim), overwrite=False) and _latest()[0] == mine:
            _forget(below=mine)
            return mine
        holder = latest or holder
    raise ClaimedError(holder)


def give_back(number: int) -> None:
    """Give up a claim. Its number stays recorded, so that it is never given out twice."""
    _put(number, None, overwrite=True)


def _latest() -> tuple[int, Claim | None]:
    """The highest number that was given out, and its claim, if it is held."""
    number = max((int(key.decode().removeprefix(PREFIX)) for key in _keys()), default=0)
    value = _internal_kv_get(_key(number), namespace=NAMESPACE)
    values = json.loads(value) if value else None
    return number, Claim.of_values(values) if values else None


def _forget(*, below: int) -> None:
    for key in _keys():
        if key.decode() < _key(below):
            _internal_kv_del(key, namespace=NAMESPACE)


def _keys() -> list[bytes]:
    return list(_internal_kv_list(PREFIX, namespace=NAMESPACE))


def _key(number: int) -> str:
    return f"{PREFIX}{number:0{NUMBER_DIGITS}d}"


def _put(number: int, value: object, *, overwrite: bool) -> bool:
    """Write a number's value; False when the number was already given out."""
    existed: bool = _internal_kv_put(_key(number), json.dumps(value), overwrite=overwrite, namespace=NAMESPACE)
    return not existed


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have no name
        return f"user {os.getuid()}"
