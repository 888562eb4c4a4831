"""From the configuration to the settings of the packages."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster import cli
from cluster.config.config import BatonConfig
from cluster.config.settings_sections import CacheSection, GPUSection, RouterSection, SchedulerSection, TransferSection
from engine.contract.config import CacheConfig, CoreSharing, GPUConfig, SchedulerConfig
from engine.contract.promise import NO_PROMISE, Promise
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from kv_transfer.options import ConnectorOptions
from router.settings import RouterSettings
from scripts.config_page import configuration_page

MODEL = Path("/models/m")


def test_defaults_of_every_room_hold_where_nothing_is_configured() -> None:
    config = BatonConfig(roles="fixed")

    engine = config.engine_config("decode", model=MODEL, num_threads=3)

    assert engine.cache == CacheConfig()
    assert engine.scheduler == SchedulerConfig()
    assert (engine.model.path, engine.model.num_threads) == (MODEL, 3)
    assert config.transfer_options() == ConnectorOptions(transport="local")
    assert config.router_settings() == RouterSettings(roles="fixed")
    assert BatonConfig().router_settings() == RouterSettings(roles="elastic")


def test_pool_overrides_only_what_it_names() -> None:
    config = BatonConfig.model_validate(
        {
            "roles": "fixed",
            "max_model_len": 512,
            "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 512},
            "decode": {"scheduler": {"max_num_seqs": 64}, "num_threads": 5},
        }
    )

    prefill = config.engine_config("prefill", model=MODEL, num_threads=1)
    decode = config.engine_config("decode", model=MODEL, num_threads=1)

    assert prefill.scheduler == SchedulerConfig(
        max_num_seqs=32, max_num_batched_tokens=512, max_model_len=512, enable_cache_events=True
    )
    assert decode.scheduler == SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=512)
    assert (prefill.model.num_threads, decode.model.num_threads) == (1, 5)


def test_pool_gives_the_size_of_its_cache_in_another_way() -> None:
    config = BatonConfig.model_validate(
        {"cache": {"kv_cache_bytes": 1 << 30}, "decode": {"cache": {"num_blocks": 9}}, "prefill": {"cache": {}}}
    )

    caches = {pool: config.engine_config(pool, model=Path("m"), num_threads=1).cache for pool in ("prefill", "decode")}

    assert (caches["decode"].num_blocks, caches["decode"].kv_cache_bytes) == (9, None)
    assert (caches["prefill"].num_blocks, caches["prefill"].kv_cache_bytes) == (None, 1 << 30)


def test_prefill_workers_of_fixed_roles_capture_no_decode_steps_unless_told_to() -> None:
    def captures(gpu: dict[str, object], pool: str, roles: str = "fixed") -> object:
        config = BatonConfig.model_validate({"gpu": gpu, "roles": roles})
        return config.engine_config(pool, model=MODEL, num_threads=1).gpu.cuda_graphs

    assert (captures({}, "prefill"), captures({}, "decode")) == (False, "auto")
    assert (captures({"cuda_graphs": True}, "prefill"), captures({"cuda_graphs": True}, "decode")) == (True, True)
    assert captures({}, "prefill", "elastic") == "auto"


def test_largest_graph_of_no_rows_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_graph_batch_size must be at least 1, got 0"):
        BatonConfig.model_validate({"decode": {"gpu": {"max_graph_batch_size": 0}}})


def test_override_equal_to_the_default_still_overrides() -> None:
    config = BatonConfig.model_validate(
        {"cache": {"num_blocks": 10}, "prefill": {"cache": {"num_blocks": None}}},
    )

    assert config.engine_config("prefill", model=MODEL, num_threads=1).cache.num_blocks is None
    assert config.engine_config("decode", model=MODEL, num_threads=1).cache.num_blocks == 10


@pytest.mark.parametrize(
    ("section", "settings", "omitted"),
    [
        (CacheSection, CacheConfig, set()),
        (SchedulerSection, SchedulerConfig, {"max_model_len", "cuts_decode_steps"}),
        (GPUSection, GPUConfig, set()),
        (TransferSection, ConnectorOptions, set()),
        (RouterSection, RouterSettings, {"metrics_compat", "promise", "roles", "allows_faults", "scaling"}),
    ],
)
def test_every_setting_is_a_key_and_is_described(section: type, settings: type, omitted: set[str]) -> None:
    fields = section.model_fields  # type: ignore[attr-defined]

    assert set(fields) == {field.name for field in dataclasses.fields(settings)} - omitted
    assert [name for name, field in fields.items() if not field.description] == []


def test_every_top_level_key_is_described() -> None:
    assert [name for name, field in BatonConfig.model_fields.items() if not field.description] == []


def test_every_flag_of_serve_is_a_key() -> None:
    flags = set(inspect.signature(cli.serve).parameters) - {"config", "context", "api_key"}

    assert flags <= set(BatonConfig.model_fields)


def test_configuration_page_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "configuration.md"

    assert page.read_text() == configuration_page(), "run: python -m scripts.config_page > docs/configuration.md"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, CoreSharing(borrows=True)),
        ({"decode": {"num_threads": 1}}, CoreSharing(borrows=False)),
        ({"decode": {"num_threads": 1}, "borrow_idle_cores": True}, CoreSharing(borrows=True, is_required=True)),
        ({"borrow_idle_cores": False}, None),
    ],
)
def test_workers_without_a_number_of_threads_borrow_cores_unless_told_otherwise(
    config: dict[str, object], expected: CoreSharing | None
) -> None:
    assert BatonConfig.model_validate(config).core_sharing("decode") == expected


def test_cores_are_not_borrowed_for_gpus() -> None:
    with pytest.raises(ValidationError, match="borrow_idle_cores is true, but device is cuda"):
        BatonConfig.model_validate({"borrow_idle_cores": True, "device": "cuda"})


@pytest.mark.parametrize(
    ("config", "transport"),
    [
        ({}, "local"),
        ({"address": "auto"}, "network"),
        ({"kv_transfer": {"transport": "network"}}, "network"),
        ({"address": "auto", "kv_transfer": {"transport": "local"}}, "local"),
    ],
)
def test_a_private_ray_moves_kv_without_a_port_unless_told_otherwise(config: dict[str, object], transport: str) -> None:
    assert BatonConfig.model_validate(config).transfer_options().transport == transport


def test_faults_reach_the_connector_with_their_schedule() -> None:
    faults = {"seed": 3, "read_fails": 0.5, "schedule": [{"fault": "bit_flips", "nth": 2}]}

    config = BatonConfig.model_validate({"kv_transfer": {"allow_faults": True, "faults": faults}})

    options = config.transfer_options()
    assert options.faults == FaultOptions(
        seed=3, read_fails=0.5, schedule=(ScheduledFault(fault=Fault.BIT_FLIPS, nth=2),)
    )


@pytest.mark.parametrize(
    "transfer, message",
    [
        ({"faults": {"read_fails": 0.5}}, "allow_faults"),
        ({"allow_faults": True, "faults": {"read_fails": 2.0}}, "faults.read_fails"),
        ({"allow_faults": True, "faults": {"reads_fail": 0.5}}, "reads_fail"),
        ({"allow_faults": True, "faults": {"schedule": [{"fault": "bit_flips", "nth": 0}]}}, "nth"),
        ({"allow_faults": True, "faults": {"schedule": [{"fault": "flood", "nth": 1}]}}, "flood"),
        ({"allow_faults": True, "faults": {"schedule": [{"fault": "bit_flips", "nth": 1, "x": 1}]}}, "x"),
    ],
)
def test_faults_that_are_not_allowed_or_not_known_are_refused(transfer: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BatonConfig.model_validate({"kv_transfer": transfer})


@pytest.mark.parametrize(
    ("router", "mirrored"),
    [
        ({}, {"prefill"}),
        ({"prefill_policy": "queued_tokens"}, set()),
        ({"prefill_policy": "queued_tokens", "decode_policy": "prefix"}, {"decode"}),
        ({"local_prefill_tokens": 8}, {"prefill", "decode"}),
    ],
)
def test_engines_record_their_caches_where_routers_need_to_know(router: dict[str, object], mirrored: set[str]) -> None:
    config = BatonConfig.model_validate({"router": router, "roles": "fixed"})
    pools: tuple[str, ...] = ("prefill", "decode")

    recording = {
        pool for pool in pools if config.engine_config(pool, model=MODEL, num_threads=1).scheduler.enable_cache_events
    }

    assert recording == mirrored


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("127.0.0.2", True),
        ("0.0.0.0", False),
        ("10.0.0.5", False),
    ],
)
def test_router_knows_whether_it_listens_on_the_loopback_address_only(host: str, is_loopback: bool) -> None:
    config = BatonConfig.model_validate({"host": host, "security": {"allowed_hosts": ["chat.example.org"]}})

    settings = config.security_settings()

    assert (settings.is_loopback, settings.allowed_hosts) == (is_loopback, ("chat.example.org",))


@pytest.mark.parametrize("key", ["own_admin_key", "is_loopback"])
def test_what_a_cluster_finds_out_by_itself_is_no_setting(key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        BatonConfig.model_validate({"security": {key: True}})


def test_name_with_a_port_is_no_name_of_a_host() -> None:
    with pytest.raises(ValidationError, match=r"security\.allowed_hosts: 'a\.example:80'"):
        BatonConfig.model_validate({"security": {"allowed_hosts": ["a.example:80"]}})


def test_promise_of_the_cluster_reaches_the_routers() -> None:
    assert BatonConfig().router_settings().promise == NO_PROMISE

    config = BatonConfig.model_validate({"slo": {"ttft_ms": 2000, "itl_ms": 80.5}})

    assert config.router_settings().promise == Promise(ttft_ms=2000.0, itl_ms=80.5)


@pytest.mark.parametrize("slo", [{"itl_ms": 0}, {"ttft_ms": -1}, {"itl_ms": 1e9}, {"tpot_ms": 20}, {"itl_ms": True}])
def test_promise_that_makes_no_sense_is_refused(slo: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(slo))):
        BatonConfig.model_validate({"slo": slo})


@pytest.mark.parametrize(
    ("router", "words"),
    [
        ({"read_timeout_s": 0}, "router.read_timeout_s must be more than 0 seconds, got 0"),
        (
            {"default_timeout_s": 20, "max_timeout_s": 10},
            "router.default_timeout_s (20.0) is larger than router.max_timeout_s (10.0)",
        ),
        ({"rebalance_max_kv_usage": 2}, "router.rebalance_max_kv_usage must be from 0.2 to 1, got 2"),
    ],
)
def test_setting_of_the_router_is_named_as_it_is_written(router: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        BatonConfig.model_validate({"router": router})

    assert words in str(refused.value)


def test_tracing_that_cannot_be_is_refused_with_its_key() -> None:
    for section, message in (
        ({"otlp_endpoint": "localhost:4318"}, "tracing.otlp_endpoint is 'localhost:4318': it must be the URL"),
        ({"sample_ratio": 2}, "tracing.sample_ratio must be from 0 to 1, got 2"),
        ({"service_name": ""}, "tracing.service_name is empty"),
    ):
        with pytest.raises(ValidationError, match=re.escape(message)):
            BatonConfig.model_validate({"tracing": section})


def test_tracing_is_off_by_default_and_its_section_may_be_empty() -> None:
    assert not BatonConfig().tracing_settings().is_on
    assert BatonConfig.model_validate({"tracing": None}).tracing_settings() == BatonConfig().tracing_settings()
