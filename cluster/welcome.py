"""What `baton serve` prints once it serves."""

from __future__ import annotations

import json
import shlex

from cluster.api_url import base_url
from cluster.config import LOOPBACK_HOSTS, BatonConfig
from cluster.served_model import ServedModel


def welcome(config: BatonConfig, model: ServedModel, *, logs: str) -> str:
    """What is served where, where its processes write their logs, and a command that proves it."""
    url = base_url(config)
    body = json.dumps({"model": model.name, "messages": [{"role": "user", "content": model.example_question}]})
    pools = f"{config.prefill_replicas} prefill, {config.decode_replicas} decode, {config.router_replicas} router"
    has_keys = bool(config.security_settings().loaded().api_keys)
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if has_keys else ""
    lines = [
        f"Serving {model.name} on {url} ({pools}). Press Ctrl-C to stop.",
        f"Logs: {logs}",
        "Try it:",
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
    ]
    if config.host not in LOOPBACK_HOSTS and not has_keys:
        lines.insert(1, f"Anyone who can reach {config.host}:{config.port} may use it: no keys are configured.")
    return "\n".join(lines)
