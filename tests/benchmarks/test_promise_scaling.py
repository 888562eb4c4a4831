"""The means over several draws of a load are compared with the one fixed size that is best for all of them."""

from __future__ import annotations

from benchmarks.promise_scaling import over_all_draws
from benchmarks.report import Row

COURSE = "daily/prompt_heavy"


def rows_of(kind: str, attained: tuple[float, float], hours: tuple[float, float]) -> list[Row]:
    return [
        Row(name=f"{what}/{kind}/{COURSE}/seed={seed}", value=value, unit="")
        for what, values in (("attainment", attained), ("worker_hours", hours))
        for seed, value in enumerate(values)
    ]


def test_fixed_size_must_attain_the_target_over_all_draws() -> None:
    """Two workers are enough for the first draw only; three are for both."""
    rows = rows_of("fixed=2", (100.0, 90.0), (2.0, 2.0)) + rows_of("fixed=3", (100.0, 99.0), (3.0, 3.0))
    rows += rows_of("promise", (99.0, 100.0), (2.0, 2.5))

    means = {row.name: row for row in over_all_draws(rows, COURSE, [2, 3], num_draws=2, target=0.99)}

    assert means[f"gain/{COURSE}/all"].detail == {"best_fixed": 3}
    assert means[f"gain/{COURSE}/all"].value == 0.0
    assert means[f"hours_ratio/{COURSE}/all"].value == 2.25 / 3.0
    assert means[f"attainment/promise/{COURSE}/all"].value == 99.5
    assert f"changes/{COURSE}/all" not in means
