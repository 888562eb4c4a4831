"""What `baton serve` prints once it serves."""

from __future__ import annotations

import json
import shlex

from cluster.config.api_url import base_url
from cluster.config.config import BatonConfig
from cluster.config.served_model import ServedModel
from router.host_rule import is_loopback_name


def welcome(config: BatonConfig, model: ServedModel, *, logs: str) -> str:
    """The model, its URL, the place of the logs, and a command with which to try it."""
    url = base_url(config)
    body = json.dumps({"model": model.name, "messages": [{"role": "user", "content": model.example_question}]})
    pools = ", ".join(f"{config.num_replicas(pool)} {pool}" for pool in config.pools)
    pools = f"{pools}, {config.router_replicas} router"
    has_keys = bool(config.security_settings().loaded().api_keys)
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if has_keys else ""
    lines = [
        f"Serving {model.name} on {url} ({pools}). Press Ctrl-C to stop.",
        f"Logs: {logs}",
        "Try it:",
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
    ]
    if warning := open_api_warning(config):
        lines.insert(1, warning)
    return "\n".join(lines)


def open_api_warning(config: BatonConfig) -> str | None:
    """The warning for an API that is open to other machines and asks for no key; otherwise None."""
    if is_loopback_name(config.host) or config.security_settings().loaded().api_keys:
        return None
    pages = "" if config.security_settings().allowed_hosts else ", and any web page that they visit,"
    return (
        f"WARNING: anyone who can reach {config.host}:{config.port}{pages} may use it: no keys are configured "
        "(`baton keys new`)."
    )
