"""A running cluster's records of its requests, and the reports of its workers, for `baton whatif`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from cluster.client import NotBatonError, answer_of, bearer
from simulation.whatif.recorded import RecordedRequest
from simulation.whatif.reported import ReportedWorker

TIMEOUT_S = 30.0
NUM_ASKED = 500
"""The most records that a cluster returns at once."""

_WORKERS = TypeAdapter(list[ReportedWorker])


def recorded_requests(url: str, *, api_key: str = "") -> list[RecordedRequest]:
    """The last requests that ended well, oldest first: all requests with an admin key, otherwise those of the key.

    Raises:
        httpx.HTTPError: The cluster does not answer, or is not one of Baton's.
    """
    with httpx.Client(base_url=url, headers=bearer(api_key), timeout=TIMEOUT_S, trust_env=False) as client:
        rows = answer_of(client.get("/v1/requests", params={"limit": NUM_ASKED}), "data")["data"]
    try:
        finished = [row for row in rows if row["state"] == "finished" and row["completion_tokens"]]
        found = [request for row in finished for request in _recorded(row)]
    except (KeyError, TypeError, ValueError) as error:
        raise NotBatonError(f"the requests that {url} lists are not as this version knows them: {error!r}") from error
    return sorted(found, key=lambda request: request.at_s)


def _recorded(row: dict[str, Any]) -> Iterator[RecordedRequest]:
    """One request per prompt of a body. Token times are recorded only for the first choice of the first prompt."""
    at_s = float(row["started_unix_s"])
    choices = [(int(num_prompt), int(num_output)) for num_prompt, num_output in row["choices"]]
    firsts = [index for index, (num_prompt, _) in enumerate(choices) if num_prompt]
    for index, end in pairwise((*firsts, len(choices))):
        num_prompt, num_output = choices[index]
        yield RecordedRequest(
            at_s=at_s,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            num_cached_tokens=0 if index else int(row["cached_tokens"]),
            ttft_ms=None if index or row["ttft_ms"] is None else float(row["ttft_ms"]),
            gaps=() if index else [(float(gap_ms), int(count)) for gap_ms, count in row["gaps"]],
            other_outputs=[num_tokens for _, num_tokens in choices[index + 1 : end]],
        )


def reported_workers(url: str, *, api_key: str = "") -> list[ReportedWorker]:
    """The reports of the workers that answer now.

    Raises:
        httpx.HTTPError: The cluster does not answer, or is not one of Baton's.
    """
    with httpx.Client(base_url=url, headers=bearer(api_key), timeout=TIMEOUT_S, trust_env=False) as client:
        pools = answer_of(client.get("/status"), "pools")["pools"]
    try:
        rows = [row for pool in pools.values() for row in pool if row["state"] != "unreachable"]
        return _WORKERS.validate_python([row for row in rows if row["block_size"] is not None])
    except (AttributeError, KeyError, TypeError, ValidationError) as error:
        raise NotBatonError(f"the workers that {url} lists are not as this version knows them: {error!r}") from error
