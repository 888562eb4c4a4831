"""What is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cluster.config.config import BatonConfig
from cluster.plan.preflight import (
    PreflightError,
    check_checkpoint,
    check_draft_model,
    check_model_len,
    check_port,
    check_ray_address,
    check_shared_memory,
    check_tracing,
    preflight,
)
from engine.contract.errors import CheckpointError
from engine.model.builtin import builtin_model_dir
from engine.model.registry import load_model_config
from tests.support.engine.checkpoints import make_checkpoint


def test_length_beyond_the_models_is_refused_with_both_numbers() -> None:
    limit = load_model_config(builtin_model_dir()).max_model_len

    with pytest.raises(PreflightError, match=f"max_model_len is {limit + 1}, but .* a context of {limit} tokens"):
        check_model_len(limit + 1, builtin_model_dir())


def test_model_length_itself_and_none_are_accepted() -> None:
    limit = load_model_config(builtin_model_dir()).max_model_len

    check_model_len(limit, builtin_model_dir())
    check_model_len(None, builtin_model_dir())


def test_model_that_cannot_be_looked_at_is_refused_with_the_reason() -> None:
    path = Path("/") / ("a" * 300)

    with pytest.raises(CheckpointError, match=f"{path} cannot be read: File name too long"):
        check_checkpoint(path)


@pytest.mark.parametrize("host", ["10.0.0..1", "a" * 70])
def test_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(PreflightError, match=rf"cannot listen on {host}:8000: that is not a valid host name; choose"):
        check_port(host, 8000)


@pytest.mark.parametrize("host", ["10.0.0..1", "300.1.1.1", "a b"])
def test_host_of_a_deployment_that_is_no_address_is_refused_before_anything_changes(host: str) -> None:
    with pytest.raises(
        PreflightError, match=rf"host is '{host}', which is not a usable address: .*; use 0.0.0.0 for all"
    ):
        preflight(BatonConfig(address="auto", host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost", "10.99.99.99"])
def test_host_of_a_deployment_need_be_none_of_this_machine(host: str) -> None:
    preflight(BatonConfig(address="auto", host=host))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:" + "9" * 5000, "127.0.0.1:99999", "127.0.0.1:0", ":6379", "", "127.0.0.1", "ray://127.0.0.1:10001"],
)
def test_ray_address_that_cannot_be_is_refused_with_one_that_can(address: str) -> None:
    with pytest.raises(PreflightError, match=r"neither HOST:PORT, as .* \(10\.0\.0\.10:6379\), nor 'auto'"):
        check_ray_address(address)


@pytest.mark.parametrize(
    ("address", "reason"), [("10.0.0..1:6379", "that is not a valid host name"), ("127.0.0.1:1", "Connection refused")]
)
def test_ray_that_does_not_answer_is_asked_after(address: str, reason: str) -> None:
    with pytest.raises(PreflightError, match=f"{reason}; use the address that `ray start --head` printed"):
        check_ray_address(address)


def test_model_that_is_no_directory_is_named_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none is not a directory: `model` must be one on this machine"):
        check_checkpoint(tmp_path / "none")


def drafted_by(path: Path) -> BatonConfig:
    return BatonConfig.model_validate({"speculative": {"method": "draft_model", "draft_model": str(path)}})


def test_draft_model_of_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama")
    other = make_checkpoint(tmp_path / "other", "llama", vocab_size=312)

    check_draft_model(drafted_by(model), model)
    with pytest.raises(PreflightError, match=r"312 tokens.*320"):
        check_draft_model(drafted_by(other), model)


def test_draft_model_that_is_no_checkpoint_is_refused_with_its_key(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama")

    with pytest.raises(
        PreflightError, match=r"speculative\.draft_model is '.*missing'.*name the directory of a smaller"
    ):
        check_draft_model(drafted_by(tmp_path / "missing"), model)


def with_tokens(path: Path, tokens: list[str], *, special: dict[int, str] | None = None) -> Path:
    """A checkpoint whose vocabulary has these tokens."""
    make_checkpoint(path, "llama")
    backend = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0]))
    content = json.loads(backend.to_str())
    for token_id, token in (special or {}).items():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": token_id, "content": token, "special": True, **flags})
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def test_draft_model_of_other_tokens_is_refused_with_the_first_that_differ(tmp_path: Path) -> None:
    model = with_tokens(tmp_path / "model", ["?", "a", "b", "c", "d", "e"], special={6: "<end>"})
    other = with_tokens(tmp_path / "other", ["?", "a", "c", "b", "e", "d"], special={6: "<end>"})

    named = r"2 is 'b' in the model and 'c' in the draft model; 3 is .*; 4 is .*, and 1 more"
    with pytest.raises(PreflightError, match=rf"speculative\.draft_model.*other tokens.*{named}.*of the same family"):
        check_draft_model(drafted_by(other), model)


def test_draft_model_of_another_special_token_is_refused(tmp_path: Path) -> None:
    model = with_tokens(tmp_path / "model", ["?", "a"], special={2: "<end>"})
    other = with_tokens(tmp_path / "other", ["?", "a"], special={2: "<turn>"})

    with pytest.raises(PreflightError, match="2 is '<end>' in the model and '<turn>' in the draft model"):
        check_draft_model(drafted_by(other), model)


def test_draft_model_that_lacks_a_token_of_chats_is_accepted(tmp_path: Path) -> None:
    model = with_tokens(tmp_path / "model", ["?", "a"], special={2: "<end>", 3: "<tool>"})

    check_draft_model(drafted_by(with_tokens(tmp_path / "base", ["?", "a"], special={2: "<end>"})), model)


def test_of_a_draft_model_without_tokenizer_it_is_told_what_was_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_tokens(tmp_path / "model", ["?", "a"])

    check_draft_model(drafted_by(make_checkpoint(tmp_path / "bare", "llama")), model)

    assert "bare has no tokenizer.json, so only the sizes" in caplog.text


def test_draft_model_whose_tokenizer_cannot_be_read_is_named(tmp_path: Path) -> None:
    model, other = with_tokens(tmp_path / "model", ["?", "a"]), make_checkpoint(tmp_path / "other", "llama")
    (other / "tokenizer.json").write_text("{")

    with pytest.raises(PreflightError, match=r"speculative\.draft_model: cannot read .*tokenizer\.json"):
        check_draft_model(drafted_by(other), model)


def test_protocol_that_spans_cannot_be_sent_by_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    wanted = BatonConfig.model_validate({"tracing": {"otlp_endpoint": "http://localhost:4317"}})

    with pytest.raises(PreflightError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'grpc', and Baton sends spans by"):
        preflight(wanted)


def test_exporter_is_asked_for_only_where_spans_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")

    check_tracing(BatonConfig())


@pytest.mark.parametrize("folder", [Path(), Path.cwd()])
def test_name_on_the_hub_is_told_how_to_be_downloaded(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"`hf download owner/Llama-3\.1 --local-dir DIR`, then use --model DIR"):
        check_checkpoint(folder / "owner/Llama-3.1")


@pytest.mark.parametrize("name", ["models/mine", "/models/mine", "mine"])
def test_path_is_told_of_no_download(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()

    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(Path(name))

    assert "hf download" not in str(caught.value)


def test_machine_without_shared_memory_for_all_workers_is_refused(tmp_path: Path) -> None:
    """They would never meet, and the start would wait for that."""
    config = BatonConfig(prefill_replicas=3, decode_replicas=2)

    with pytest.raises(PreflightError, match=r"KV moves over shared memory here, but .* cannot be used"):
        check_shared_memory(config, tmp_path / "none")


def test_workers_that_meet_over_the_network_need_no_shared_memory(tmp_path: Path) -> None:
    check_shared_memory(BatonConfig.model_validate({"kv_transfer": {"transport": "network"}}), tmp_path / "none")
