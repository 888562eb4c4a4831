"""Checks before any process is started: the checkpoint, the device, the port."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cluster.config.config import BatonConfig
from cluster.config.served_model import ServedModel, served_model
from engine.contract.config import ModelCode
from engine.contract.errors import CheckpointError, ConfigError
from engine.executor.draft_engine import DraftEngine
from engine.model.registry import ANY_CODE, load_model_config
from engine.model.weights.shards import check_shards
from kv_transfer.nixl.ucx_access import SHARED_MEMORY, shared_memory_lack
from router.errors import ModelDirectoryError
from router.security import SecurityError
from router.telemetry.availability import TracingUnavailableError, check_available
from router.text.generation_config import load_generation_defaults
from router.text.template_files import load_chat_templates
from router.text.tokenizer import Tokenizer

RAY_CONNECT_TIMEOUT_S = 5.0
MAX_PORT_DIGITS = 5
MAX_PORT = 65_535
MAX_NAMED: Final = 3
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""Pattern of model names on the Hugging Face hub: an owner and a name."""


class PreflightError(Exception):
    """A problem outside of the configuration. The message is one line that says what to change."""


logger = logging.getLogger(f"baton.{__name__}")


def preflight(config: BatonConfig) -> ServedModel:
    """Check what can be checked on this machine without starting anything.

    Raises:
        CheckpointError, PreflightError: One line that says what is wrong.
    """
    check_keys(config)
    check_tracing(config)
    model = served_model(config)
    check_checkpoint(model.path, config.model_code)
    check_model_len(config.max_model_len, model.path, config.model_code)
    check_draft_model(config, model.path)
    if config.address is None:
        check_device(config.device)
        check_port(config.host, config.port)
        check_shared_memory(config)
    else:
        check_host(config.host)
        check_ray_address(config.address)
    return model


def check_keys(config: BatonConfig) -> None:
    """Read the files of keys.

    Raises:
        PreflightError: A key file cannot be used.
    """
    try:
        config.security_settings().loaded()
    except SecurityError as error:
        raise PreflightError(str(error)) from error


def check_tracing(config: BatonConfig) -> None:
    """If tracing is configured, check that this machine can create spans.

    Raises:
        PreflightError: It cannot.
    """
    try:
        check_available(config.tracing_settings())
    except TracingUnavailableError as error:
        raise PreflightError(str(error)) from error


def _download_hint(path: Path) -> str:
    """How to download a model, if the user gave its name on the Hugging Face hub instead of a path.

    A configuration has turned the name into an absolute path. If there is a folder with the owner's name, the user
    meant a path.
    """
    name = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if not HUB_NAME.fullmatch(str(name)) or path.parent.is_dir():
        return ""
    return f". Baton does not download models: run `hf download {name} --local-dir DIR`, then use --model DIR"


def check_checkpoint(path: Path, code: ModelCode = ANY_CODE) -> None:
    """Check everything in a model directory except the weights themselves.

    Raises:
        CheckpointError: It is no checkpoint, its architecture is not supported, or a shard is missing or cut short.
    """
    try:
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is not a directory: `model` must be one on this machine, with config.json, weights and "
                f"tokenizer{_download_hint(path)}"
            )
        load_model_config(path, code)
        check_text_files(path)
        check_shards(path)
    except OSError as error:  # a path that cannot be read at all, such as another user's folder
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def check_model_len(max_model_len: int | None, path: Path, code: ModelCode = ANY_CODE) -> None:
    """Refuse a ``max_model_len`` above the length that the model was made for.

    Raises:
        PreflightError: It is above that.
    """
    limit = load_model_config(path, code).max_model_len
    if max_model_len is not None and max_model_len > limit:
        raise PreflightError(
            f"max_model_len is {max_model_len}, but the model in {path} has a context of {limit} tokens: lower it"
        )


def check_draft_model(config: BatonConfig, path: Path) -> None:
    """Check the draft model for the model in ``path``, if there is one, but not its weights.

    Raises:
        PreflightError: Its directory is not a checkpoint, or its token ids have other meanings.
    """
    drafts: set[Path] = set()
    for pool in config.pools:
        try:
            draft = DraftEngine.of(config.engine_config(pool, model=path, num_threads=1))
            if draft is not None and (draft_path := draft.config.model.path) not in drafts:
                drafts.add(draft_path)
                check_shards(draft_path)
        except ConfigError as error:
            raise PreflightError(str(error)) from error
        except (CheckpointError, OSError) as error:
            named = config.speculative.draft_model  # type: ignore[attr-defined]  # the section is made at run time
            reason = f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)
            raise PreflightError(
                f"speculative.draft_model is {str(named)!r}: {reason}; name the directory of "
                "a smaller checkpoint of the same family, on this machine, or set speculative.method to ngram or suffix"
            ) from error
    for draft_path in drafts:
        _check_draft_vocabulary(path, draft_path)


def _check_draft_vocabulary(path: Path, draft_path: Path) -> None:
    for lacking in (path, draft_path):
        if not tells_tokens(lacking):
            logger.warning(
                "speculative.draft_model: %s has no tokenizer.json, so only the sizes of the two vocabularies were "
                "compared; put that model's tokenizer.json there, so that its tokens can be compared",
                lacking,
            )
            return
    try:
        differences = first_differences(path, draft_path)
    except ModelDirectoryError as error:
        raise PreflightError(f"speculative.draft_model: {error}") from error
    if differences:
        raise PreflightError(
            f"speculative.draft_model: the model in {draft_path} has other tokens than the one in {path}: {differences}"
            "; use a draft model of the same family, with the same tokenizer"
        )


def check_text_files(path: Path) -> None:
    """Load the tokenizer and the chat template, as the router will.

    Raises:
        CheckpointError: A file is missing, or cannot be used.
    """
    try:
        tokenizer = Tokenizer.load(path)
        load_chat_templates(path, special_tokens=tokenizer.special.named)
        load_generation_defaults(path)
    except ModelDirectoryError as error:
        raise CheckpointError(str(error)) from error


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have."""
    if device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        raise PreflightError(
            "device 'cuda' was asked for, but this machine has no usable GPU; use --device cpu or auto"
        )


def check_ray_address(address: str) -> None:
    """Refuse an address where nothing answers; Ray itself would try for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    is_port = port.isdecimal() and len(port) <= MAX_PORT_DIGITS and 1 <= int(port) <= MAX_PORT
    if not host or not is_port or "/" in address:
        raise PreflightError(
            f"the Ray address {address!r} is neither HOST:PORT, as `ray start --head` prints it (10.0.0.10:6379), nor "
            "'auto', the Ray of this machine"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=RAY_CONNECT_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:
        raise PreflightError(
            f"no Ray answers at {address}: {reason_of(error)}; use the address that `ray start --head` printed, and "
            "check that Ray runs there"
        ) from error


def check_shared_memory(config: BatonConfig, folder: Path = SHARED_MEMORY) -> None:
    """Refuse a machine whose workers could not connect over shared memory: the start would wait for them in vain.

    Raises:
        PreflightError: The machine has too little free shared memory.
    """
    if config.transfer_options().transport != "local":
        return
    lack = shared_memory_lack(num_agents=sum(config.num_replicas(pool) for pool in config.pools), folder=folder)
    if lack:
        raise PreflightError(lack)


def check_host(host: str) -> None:
    """Refuse a host that is not an address at all. Whether a machine of the cluster has it shows only there.

    Raises:
        PreflightError: It is not an address.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PreflightError(
            f"host is {host!r}, which is not a usable address: {reason_of(error)}; use 0.0.0.0 for all addresses of a "
            "machine"
        ) from error


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before anything else is started."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise PreflightError(
            f"cannot listen on {host}:{port}: {reason_of(error)}; choose another with --host or --port"
        ) from error


def reason_of(error: OSError | UnicodeError) -> str:
    """Why an address cannot be used. A name with an empty or too long part, such as 10.0.0..1, is a UnicodeError."""
    if isinstance(error, UnicodeError):
        return "that is not a valid host name"
    return error.strerror or str(error)


def tells_tokens(path: Path) -> bool:
    """True when a model directory has its vocabulary."""
    return (path / "tokenizer.json").is_file()


def first_differences(main: Path, draft: Path) -> str:
    """A text with the first ids that mean different tokens in the two directories; empty if there are none.

    Tokens that only one directory has, such as tokens added for chats, are ignored.

    Raises:
        ModelDirectoryError: A tokenizer.json cannot be used.
    """
    differing = list(_differing(_tokens(main), _tokens(draft)))
    named = [
        f"{token_id} is {one!r} in the model and {other!r} in the draft model" for token_id, one, other in differing
    ]
    more = f", and {len(named) - MAX_NAMED:,} more" if len(named) > MAX_NAMED else ""
    return "; ".join(named[:MAX_NAMED]) + more


def _differing(main: dict[int, str], draft: dict[int, str]) -> Iterator[tuple[int, str, str]]:
    for token_id in sorted(main.keys() & draft.keys()):
        if main[token_id] != draft[token_id]:
            yield token_id, main[token_id], draft[token_id]


def _tokens(path: Path) -> dict[int, str]:
    """Every token of a vocabulary by its id, added and special ones included."""
    vocabulary = Tokenizer.load(path).backend.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}
