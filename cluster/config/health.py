"""When a worker counts as hanging: the settings."""

from __future__ import annotations

from pydantic import Field

from cluster.config.config_section import Section


class HealthSection(Section):
    """When a worker counts as hanging. Serve replaces a worker after three checks in a row that failed."""

    step_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="How long one step may take. A worker that has work and ends no step for so long is left out and "
        "replaced; raise it for models whose largest step takes seconds on your machine.",
    )
    drain_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="How long a worker or router that is to go may take until its requests have finished or moved; "
        "what is left then is cut off, and requests of workers are continued elsewhere.",
    )
    check_period_s: float = Field(default=1.0, gt=0, description="How often Serve asks every replica for its health.")
    check_timeout_s: float = Field(default=10.0, gt=0, description="How long the answer may take.")
