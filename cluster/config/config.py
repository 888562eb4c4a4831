"""The configuration of a cluster: its keys checked against each other, and the settings of workers and routers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Self

from pydantic import model_validator

from cluster.config.config_keys import ConfigKeys
from cluster.config.config_section import Section, settings_from, with_keys
from cluster.config.pool import PoolSection
from cluster.config.scaling import promise_rules
from engine.contract.config import (
    CacheConfig,
    CoreSharing,
    EngineConfig,
    GPUConfig,
    ModelCode,
    ModelConfigSource,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.contract.errors import ConfigError
from engine.contract.promise import Promise
from engine.contract.role import Role
from kv_transfer.errors import KVTransferError
from kv_transfer.fault_options import FaultOptions
from kv_transfer.options import ConnectorOptions
from kv_transfer.registry import CLUSTER_PEER_SOURCES
from router.host_rule import is_loopback_name
from router.roles import ROLES
from router.security import SecuritySettings
from router.settings import RouterSettings
from router.telemetry.settings import TracingSettings


class BatonConfig(ConfigKeys):
    """A cluster. Every flag of `baton serve` is one of these keys."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_router()
        engines = {pool: self._checked_engine(pool) for pool in self.pools}
        try:
            transfer = self.transfer_options()
            self.security_settings()
        except (ConfigError, KVTransferError) as error:
            raise ValueError(with_keys(str(error), ("kv_transfer", self.kv_transfer))) from error
        (first, *others), sizes = engines, {pool: engine.cache.block_size for pool, engine in engines.items()}
        for other in others:
            if sizes[first] != sizes[other]:
                raise ValueError(
                    f"{first}.cache.block_size ({sizes[first]}) and {other}.cache.block_size ({sizes[other]}) differ: "
                    "set both to the same value, so that blocks can be handed over"
                )
        if self.http_proxy in ("none", "haproxy") and self.address is not None:
            raise ValueError(
                f"http_proxy {self.http_proxy!r} only works on the private Ray of `baton serve`: on an existing Ray "
                "(address, or `baton deploy`) routers may be on any machine, where Serve's proxies find them, and "
                "HAProxy is chosen when Ray starts; leave http_proxy out"
            )
        if transfer.peer_source not in CLUSTER_PEER_SOURCES:
            raise ValueError(
                f"kv_transfer.{'chain' if transfer.chain else 'connector'} {transfer.peer_source!r} works within one "
                f"process only; a cluster needs {' or '.join(CLUSTER_PEER_SOURCES)}"
            )
        for pool, engine in engines.items():
            if transfer.tiers and not engine.cache.enable_prefix_caching:
                tier = transfer.tiers[0]
                raise ValueError(
                    f"kv_transfer.{tier.size_key} is {tier.num_bytes(transfer)}, but {pool}.cache."
                    f"enable_prefix_caching is false: the {tier.name} tier stores what the prefix cache evicts; enable "
                    f"it, or leave {tier.size_key} out"
                )
        return self

    @property
    def routers_listen(self) -> bool:
        """True when routers accept client connections themselves, without Serve's proxies."""
        return self.http_proxy == "none" or (self.http_proxy == "auto" and self.address is None)

    def _checked_engine(self, pool: str) -> EngineConfig:
        try:
            engine = self.engine_config(pool, model=Path(), num_threads=1)
            if engine.scheduler.async_scheduling is True and engine.speculative.method != "none":
                raise ConfigError(
                    f"async_scheduling true and speculative.method {engine.speculative.method!r} cannot be combined: "
                    "drafts follow the newest token, which is unknown while a step is in flight; leave one of them out"
                )
            return engine
        except ConfigError as error:
            raise ValueError(self.with_keys(str(error), pool)) from error

    def _check_router(self) -> None:
        try:
            self.router_settings()
            self.tracing_settings()
        except ValueError as error:
            raise ValueError(with_keys(str(error), ("router", self.router), ("tracing", self.tracing))) from error

    def with_keys(self, message: str, pool: str) -> str:
        """The message of a pool's engine, with settings named by their full keys in the file."""
        section = self.pool(pool)
        return with_keys(
            message,
            *((f"{pool}.cache", section.cache), (f"{pool}.scheduler", section.scheduler), (f"{pool}.gpu", section.gpu)),
            *(("cache", self.cache), ("scheduler", self.scheduler), ("gpu", self.gpu)),
            ("kv_transfer", self.kv_transfer),
        )

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if self.borrow_idle_cores is True and self.device == "cuda":
            raise ValueError(
                "borrow_idle_cores is true, but device is cuda, where models do not compute on CPU cores: leave it out"
            )
        for pool in self.pools:
            section = self.pool(pool)
            if section.num_gpus is not None and (section.num_gpus > 0) == (self.device == "cpu"):
                raise ValueError(
                    f"{pool}.num_gpus ({section.num_gpus:g}) and device ({self.device}) contradict each other: with "
                    "device cpu num_gpus must be 0, otherwise above 0"
                )
        return self

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that have workers, by the names of their roles, in display order."""
        return tuple(name for name in ROLES if self.num_replicas(name) or self.pool(name).scaling is not None)

    def pool(self, name: str) -> PoolSection:
        """The section of one pool, by the name of its role."""
        section: PoolSection = getattr(self, name)
        return section

    def role(self, pool: str) -> Role:
        """The role of a pool's workers."""
        return ROLES[pool].elastic() if self.roles == "elastic" else ROLES[pool]

    def core_sharing(self, pool: str) -> CoreSharing | None:
        """How a pool's workers share the cores of their host with other workers; None: not at all."""
        wanted = self.borrow_idle_cores
        if wanted is False:
            return None
        return CoreSharing(borrows=wanted is True or self.pool(pool).num_threads is None, is_required=wanted is True)

    def num_replicas(self, pool: str) -> int:
        """The configured number of workers, which applies if the pool does not follow its load."""
        number: int = getattr(self, f"{pool}_replicas")
        return number

    @property
    def model_code(self) -> ModelCode:
        """Which implementation of the model is used: Baton's or transformers'."""
        return ModelCode(impl=self.model_impl, trust_remote_code=self.trust_remote_code)

    def engine_config(self, pool: str, *, model: Path, num_threads: int) -> EngineConfig:
        """The settings of one pool's engines; ``num_threads`` is used if the pool sets none."""
        section, role = self.pool(pool), self.role(pool)
        return EngineConfig(
            model=ModelConfigSource(
                path=model,
                device=self.device,
                dtype=self.dtype,
                num_threads=section.num_threads or num_threads,
                code=self.model_code,
            ),
            cache=settings_from(CacheConfig, self.cache, section.cache),
            scheduler=settings_from(
                SchedulerConfig,
                self.scheduler,
                section.scheduler,
                max_model_len=self.max_model_len,
                **({"enable_cache_events": True} if self.router_settings().mirrors_cache(role) else {}),
            ),
            gpu=self._gpu_config(role, section),
            speculative=self._speculative_config(role),
        )

    def _speculative_config(self, role: Role) -> SpeculativeConfig:
        speculative = settings_from(SpeculativeConfig, self.speculative)
        if not role.decodes and speculative.method == "draft_model":  # would draft nothing, but take memory
            return dataclasses.replace(speculative, method="none", draft_model=None)
        return speculative

    def _gpu_config(self, role: Role, section: PoolSection) -> GPUConfig:
        gpu = settings_from(GPUConfig, self.gpu, section.gpu)
        if not role.decodes and gpu.cuda_graphs == "auto":  # its requests end before their first decode step
            return dataclasses.replace(gpu, cuda_graphs=False)
        return gpu

    def transfer_options(self) -> ConnectorOptions:
        """The settings of every worker's connector. Transport ``auto`` means ``local`` on a private Ray."""
        section = self.kv_transfer
        faults: Section | None = section.faults  # type: ignore[attr-defined]  # the section is made at run time
        changes: dict[str, object] = {} if faults is None else {"faults": settings_from(FaultOptions, faults)}
        options = settings_from(ConnectorOptions, section, **changes)
        if options.transport != "auto":
            return options
        return dataclasses.replace(options, transport="local" if self.address is None else "network")

    def router_settings(self) -> RouterSettings:
        """The settings of every router."""
        promise = Promise(ttft_ms=self.slo.ttft_ms, itl_ms=self.slo.itl_ms)
        others: dict[str, object] = {"metrics_compat": self.metrics.compat, "promise": promise, "roles": self.roles}
        others["allows_faults"] = self.kv_transfer.allow_faults  # type: ignore[attr-defined]  # made at run time
        scaling = {pool: self.pool(pool).scaling for pool in self.pools}
        others["scaling"] = promise_rules(scaling, roles=self.roles, promise=promise)
        return settings_from(RouterSettings, self.router, **others)

    def tracing_settings(self) -> TracingSettings:
        """Where routers and workers send spans, if anywhere."""
        return settings_from(TracingSettings, self.tracing)

    def security_settings(self) -> SecuritySettings:
        """Keys and limits of every router, with key files not yet read."""
        return settings_from(SecuritySettings, self.security, is_loopback=is_loopback_name(self.host))

    def settings_of_routers(self, own_admin_key: str | None) -> tuple[SecuritySettings, RouterSettings]:
        """The settings of routers, with key files read. Routers accept orders only if there is a key for them.

        ``own_admin_key`` is the hash of a key that `baton serve` made for itself.
        """
        security = dataclasses.replace(self.security_settings().loaded(), own_admin_key=own_admin_key)
        router = self.router_settings()
        return security, dataclasses.replace(router, admin_api=router.admin_api and security.has_admin_keys)
