"""Reading a configuration: what is accepted, and how each mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.config import BatonConfig
from cluster.config.config_file import ConfigFileError, load_config
from cluster.config.served_model import served_model


def write(folder: Path, text: str) -> Path:
    file = folder / "baton.yaml"
    file.write_text(text)
    return file


def problem(folder: Path, text: str, **flags: object) -> str:
    with pytest.raises(ConfigFileError) as caught:
        load_config(write(folder, text), flags)
    return str(caught.value)


def test_no_file_and_no_flags_are_the_defaults() -> None:
    config = load_config(None, {})

    assert (config.host, config.port, config.prefill_replicas, config.decode_replicas) == ("127.0.0.1", 8000, 1, 1)


def test_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), {}) == load_config(None, {})


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 9000\ndecode_replicas: 3\n")

    config = load_config(file, {"port": 9001, "decode_replicas": None})

    assert (config.port, config.decode_replicas) == (9001, 3)


def test_model_is_absolute_wherever_workers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert load_config(None, {"model": Path("models/mine")}).model == tmp_path / "models/mine"


def test_paths_in_a_file_are_relative_to_it_and_flags_to_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "here").mkdir()
    text = "model: ../models/mine\nsecurity: {api_key_file: keys, admin_key_file: ~/keys}\n"
    write(tmp_path / "configs", text)
    monkeypatch.chdir(tmp_path / "here")

    config = load_config(Path("../configs/baton.yaml"), {})

    assert config.model is not None
    assert config.model.resolve() == tmp_path / "models/mine"
    settings = config.security_settings()
    assert settings.api_key_file is not None
    assert settings.api_key_file.resolve() == tmp_path / "configs/keys"
    assert settings.admin_key_file == Path("~/keys")
    flagged = load_config(Path("../configs/baton.yaml"), {"model": Path("m")})
    assert flagged.model == tmp_path / "here/m"


@pytest.mark.parametrize("name", ["cache", "router", "prefill", "health"])
def test_section_whose_keys_are_all_comments_is_an_empty_one(tmp_path: Path, name: str) -> None:
    assert load_config(write(tmp_path, f"{name}:\n  # key: 1\n"), {}) == load_config(None, {})


def test_default_is_for_what_a_file_leaves_out_or_null(tmp_path: Path) -> None:
    for text, address in (("", "auto"), ("address: null", "auto"), ("address: 10.0.0.1:6379", "10.0.0.1:6379")):
        assert load_config(write(tmp_path, text), {}, defaults={"address": "auto"}).address == address
    with pytest.raises(ConfigFileError, match="leave http_proxy out"):
        load_config(write(tmp_path, "http_proxy: haproxy"), {}, defaults={"address": "auto"})


def test_model_of_a_user_who_is_not_there_is_named(tmp_path: Path) -> None:
    message = problem(tmp_path, "model: ~nobody-here/model")

    assert "model: there is no user 'nobody-here'; your own folder is ~/, got '~nobody-here/model'" in message


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("prefil_replicas: 2", "did you mean 'prefill_replicas'?"),
        ("cache: {blocksize: 8}", "did you mean 'cache.block_size'?"),
        ("decode: {scheduler: {max_seqs: 8}}", "did you mean 'decode.scheduler.max_num_seqs'?"),
        ("block_size: 8", "did you mean 'cache.block_size'?"),
        ("kv_transfer: {zzz: 8}", "known keys: connector, "),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, text: str, nearest: str) -> None:
    assert nearest in problem(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "names"),
    [("mine", ("mine",)), ("[mine]", ("mine",)), ("[mine, yours]", ("mine", "yours")), ("null", ("baton-tiny",))],
)
def test_model_may_have_several_names(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    config = load_config(write(tmp_path, f"served_model_name: {text}"), {})

    model = served_model(config)
    assert (model.name, *model.aliases) == names
    assert BatonConfig.model_validate(config.model_dump(mode="json", exclude_unset=True)) == config


@pytest.mark.parametrize("text", ['""', "[]", "5", '[a, ""]', "[a, 5]", "{a: b}"])
def test_name_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    assert "served_model_name: it must be a name or a list of names" in problem(tmp_path, f"served_model_name: {text}")


def test_every_unknown_key_is_named(tmp_path: Path) -> None:
    message = problem(tmp_path, "hots: x\nprot: 1\n")

    assert "'hots'" in message
    assert "'prot'" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("port: 70000", ("port", "65535", "70000")),
        ("prefill_replicas: 0", ("prefill_replicas", "greater than or equal to 1", "0")),
        ("dtype: int4", ("dtype", "'float32'", "'int4'")),
        ("max_model_len: long", ("max_model_len", "integer", "'long'")),
        ("cache: 5", ("cache: it must be a mapping of keys to values, got 5",)),
        ("kv_transfer: {chain: nixl}", ("kv_transfer.chain: it must be a list, got 'nixl'",)),
        ("security: {api_keys: secret}", ("security.api_keys: it must be a list",)),
        ("port: yes", ("port is true: give a number",)),
        ("decode: {scheduler: {max_num_seqs: on}}", ("decode.scheduler", "max_num_seqs is true: give a number")),
        ("model: 5", ("model: it must be a path, got 5",)),
        ('model: ""', ("model: it is empty: name a directory, or leave it out",)),
        ("decode: {scaling: {min_replicas: 5}}", ("decode.scaling.max_replicas is missing",)),
        ("decode_replicas: 100000000", ("decode_replicas", "less than or equal to 10000")),
        ('decode: {resources: {"": 1}}', ("decode.resources", "needs a name")),
        ("decode: {resources: [a]}", ("decode.resources: it must be a mapping",)),
        ("decode: {resources: {GPU: 2}}", ("decode.resources", "GPU", "num_gpus")),
        ("decode: {resources: {memory: 2}}", ("decode.resources", "memory is not a custom resource")),
        ("decode: {resources: {fast: -1}}", ("decode.resources", "fast is -1", "steps of 0.0001")),
        ("decode: {resources: {fast: 0}}", ("decode.resources", "fast is 0")),
        ("decode: {resources: {fast: .inf}}", ("decode.resources.fast", "finite number", "got inf")),
        ("startup_timeout_s: .inf", ("startup_timeout_s: it must be a finite number, got inf",)),
        ("router: {default_timeout_s: .nan}", ("router.default_timeout_s: it must be a finite number, got nan",)),
        ("health: {drain_timeout_s: .inf}", ("health.drain_timeout_s: it must be a finite number, got inf",)),
        ("prefill: {num_cpus: 0.00001}", ("prefill.num_cpus", "1e-05", "steps of 0.0001")),
        ("prefill: {num_gpus: 0.33333}", ("prefill.num_gpus", "0.33333", "steps of 0.0001")),
    ],
)
def test_wrong_value_names_key_value_and_what_is_allowed(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    message = problem(tmp_path, text)

    assert all(part in message for part in parts), message


def test_wrong_flag_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    message = problem(tmp_path, "host: localhost", port=0)

    assert message.startswith("the command line: port: ")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prefill: {cache: {block_size: 32}}", ("prefill.cache.block_size (32)", "decode.cache.block_size (16)")),
        (
            "scheduler: {max_num_seqs: 4096}",
            (": scheduler.max_num_batched_tokens (2048) is smaller than scheduler.max_num_seqs (4096)",),
        ),
        (
            "decode: {scheduler: {max_num_seqs: 4096}}",
            (": scheduler.max_num_batched_tokens (2048) is smaller than decode.scheduler.max_num_seqs (4096)",),
        ),
        (
            "decode: {cache: {num_blocks: 4}}\nmax_model_len: 64",
            ("scheduler.max_num_seqs (128)", "(decode.cache.num_blocks, cache.kv_cache_bytes or cache.gpu_memory_u"),
        ),
        (
            "kv_transfer: {connector: smoke}",
            (": kv_transfer.connector: unknown", "'smoke'", ": nixl, chain"),
        ),
        ("kv_transfer: {connector: chain}", (": kv_transfer.chain: [] needs exactly one", "workers: nixl")),
        ("kv_transfer: {chain: [nixl]}", (": kv_transfer.chain: ['nixl'] is given, but connector is 'nixl'",)),
        (
            "kv_transfer: {connector: chain, chain: [host, nixl]}",
            (": kv_transfer.chain: ['host', 'nixl'] has a host tier, but kv_transfer.host_bytes is 0",),
        ),
        ("kv_transfer: {disk_path: /x}", (": kv_transfer.disk_bytes is 0 and kv_transfer.disk_path is /x",)),
        (
            "kv_transfer: {faults: {bit_flips: 1}}",
            (": kv_transfer.faults: faults are", "kv_transfer.allow_faults is not"),
        ),
        (
            "kv_transfer: {allow_faults: true, faults: {bit_flips: 2}}",
            (": kv_transfer.faults.bit_flips: a probability", "got 2"),
        ),
        ("speculative: {min_match: 9, max_match: 3}", (": speculative.min_match (9) and speculative.max_match (3)",)),
        ("speculative: {num_tokens: 0}", (": speculative.num_tokens must be auto or 1 to 64, got 0",)),
        (
            "decode: {scheduler: {async_scheduling: true}}\nspeculative: {method: ngram}",
            (": decode.scheduler.async_scheduling true", "speculative.method 'ngram'", "leave one of them out"),
        ),
        ("router: {prefill_policy: foo}", (": router.prefill_policy must be one of kv_usage, ", "got 'foo'")),
        ("kv_transfer: {connector: inproc}", ("inproc", "nixl")),
        ("kv_transfer: {connector: chain, chain: [host, inproc], host_bytes: 9}", ("chain", "inproc", "nixl")),
        ("kv_transfer: {connector: chain, chain: [host, tape], host_bytes: 9}", ("tape", "sources: nixl, host, ")),
        ("kv_transfer: {host_bytes: 9}", (": kv_transfer.host_bytes is 9", "connector: chain, chain: [host, nixl]")),
        (
            "kv_transfer: {connector: chain, chain: [host, nixl], host_bytes: 9}\n"
            "decode: {cache: {enable_prefix_caching: false}}",
            ("host_bytes is 9", "decode.cache.enable_prefix_caching is false"),
        ),
        ("router: {default_timeout_s: 9000}", ("default_timeout_s (9000", "max_timeout_s (3600")),
        ("cache: {num_blocks: -1}", ("num_blocks", "at least 1", "-1")),
        ("decode: {cache: {kv_cache_bytes: 0}}", ("kv_cache_bytes", "at least 1", "got 0")),
        ("http_proxy: haproxy\naddress: auto", ("http_proxy", "address")),
        ("device: cpu\ndecode: {num_gpus: 0.5}", ("decode.num_gpus (0.5)", "device (cpu)")),
        ("prefill: {num_gpus: 0}", ("prefill.num_gpus (0)", "device (auto)")),
    ],
)
def test_contradiction_names_both_values(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    message = problem(tmp_path, text)

    assert all(part in message for part in parts), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [1", "not valid YAML"),
        ("- a\n- b\n", "not a list"),
        ("5", "not a int"),
        ("1: x", "unknown key 1; known keys: model, "),
        ("served_model_name: 2026-13-01", "not valid YAML: ValueError: month must be in 1..12"),
        ("port: !!int x", "not valid YAML: ValueError"),
        ("model: !!timestamp x", "not valid YAML"),
        ("cache: " + "[" * 3000, "not valid YAML: RecursionError"),
    ],
)
def test_file_that_is_no_mapping(tmp_path: Path, text: str, part: str) -> None:
    assert part in problem(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [("port: 1\nhost: x\nport: 2\n", "port", 3), ("cache:\n  num_blocks: 9\n  num_blocks: 8\n", "num_blocks", 3)],
)
def test_key_that_is_given_twice_is_named_with_its_line(tmp_path: Path, text: str, key: str, line: int) -> None:
    message = problem(tmp_path, text)

    assert f"key '{key}' is given twice" in message
    assert f"line {line}" in message


def test_merged_key_may_be_overridden(tmp_path: Path) -> None:
    text = "prefill: &pool {num_threads: 2, num_cpus: 1}\ndecode: {<<: *pool, num_threads: 3}\n"

    config = load_config(write(tmp_path, text), {})

    assert (config.decode.num_threads, config.decode.num_cpus) == (3, 1)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml", {})
