"""Draws the regret matrix: the share of requests that kept the promise, by layout, a picture for each mix.

    python -m benchmarks.disagg_parts.pictures benchmarks/results/regret.json docs/images

Under each cell stands what elastic did with its requests. Prints the tables of docs/separation.md: the means of each
layout over all cells, and each cell with the fixed layout that did best. Needs matplotlib (the extra ``plots``).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.disagg_parts.cells import ALL_CELLS, LEVELS
from benchmarks.disagg_parts.layouts import ELASTIC, LAYOUTS
from benchmarks.disagg_parts.matrix import PLACED
from simulation.loads import MIXES, SHAPES

Values = Mapping[str, float]
ACCENT, PLAIN = "#c2410c", "#94a3b8"
MEANS = ("goodput", "share_good", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms")
LEAST_SHARE = 0.05
"""Share of a cell's requests below which a kind of placement is not shown."""


def values_of(file: Path) -> dict[str, float]:
    """The rows of a stored result."""
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return {str(row["name"]): float(row["value"]) for row in rows}


def choices(values: Values, cell: str) -> str:
    """How elastic placed the requests of a cell, most frequent first."""
    placed = f"{ELASTIC}/{PLACED}"
    counts = {
        name.removeprefix(placed).partition("/")[0]: value
        for name, value in values.items()
        if name.startswith(placed) and name.endswith(f"/{cell}")
    }
    total = sum(counts.values())
    told = sorted((item for item in counts.items() if item[1] >= LEAST_SHARE * total), key=lambda item: -item[1])
    return ", ".join(f"{reason.replace('_', ' ')} {100 * count / total:.0f} %" for reason, count in told)


def best_other(values: Values, cell: str) -> tuple[str, float]:
    """The layout with the best goodput except elastic, and that goodput."""
    others = {name: values[f"{name}/goodput/{cell}"] for name in LAYOUTS if name != ELASTIC}
    best = max(others, key=others.__getitem__)
    return best, others[best]


def means(values: Values) -> str:
    """Means of each layout over all cells, and of elastic's goodput relative to the best fixed layout's."""
    lines = ["| layout | " + " | ".join(MEANS) + " |", "|---|" + "---|" * len(MEANS)]
    for layout in LAYOUTS:
        figures = (statistics.mean(values[f"{layout}/{name}/{cell.name}"] for cell in ALL_CELLS) for name in MEANS)
        lines.append(f"| {layout.replace('_', ' ')} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")
    ratios = [values[f"regret/goodput/{cell.name}"] for cell in ALL_CELLS]
    num_even = sum(ratio >= 0.98 for ratio in ratios)
    told = f"elastic's goodput over the best fixed layout's: {statistics.mean(ratios):.2f} on average, "
    return "\n".join([*lines, "", f"{told}{min(ratios):.2f} at least, 0.98 and more in {num_even} of {len(ratios)}"])


def table(values: Values) -> str:
    """The matrix as a Markdown table, one line per cell."""
    lines = [
        "| load | best fixed layout | its good requests/s, elastic's | ratio | p99 gaps: ratio | elastic did |",
        "|---|---|---|---|---|---|",
    ]
    for mix in MIXES:
        for level in LEVELS:
            for shape in SHAPES:
                cell = f"{level}/{mix}/{shape}"
                best, goodput = best_other(values, cell)
                own = values[f"{ELASTIC}/goodput/{cell}"]
                gap = values.get(f"regret/itl_p99/{cell}")
                load = f"{mix.replace('_', '-')}, {level}, {shape}"
                lines.append(
                    f"| {load} | {best.replace('_', ' ')} | {goodput:.2f}, {own:.2f} | "
                    f"{values[f'regret/goodput/{cell}']:.2f} | {'' if gap is None else f'{gap:.2f}'} | "
                    f"{choices(values, cell)} |"
                )
    return "\n".join(lines)


def draw(values: Values, mix: str, file: Path) -> None:
    """One picture: levels in rows, shapes in columns. The same rows give the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "baton", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(9, 6), layout="constrained", facecolor="white")
        figure.suptitle(f"{mix.replace('_', '-')}: requests that kept the promise, %")
        grid = figure.subplots(len(LEVELS), len(SHAPES), sharey=True)
        for line, level in enumerate(LEVELS):
            for column, shape in enumerate(SHAPES):
                cell, axes = f"{level}/{mix}/{shape}", grid[line][column]
                shares = [values[f"{name}/share_good/{cell}"] for name in LAYOUTS]
                colours = [ACCENT if name == ELASTIC else PLAIN for name in LAYOUTS]
                bars = axes.bar([name.replace("_", " ") for name in LAYOUTS], shares, color=colours)
                axes.bar_label(bars, fmt="%.0f", fontsize=7)
                axes.set(title=f"{level}, {shape}", xlabel=choices(values, cell), ylim=(0, 115))
                axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, format="svg", metadata={"Date": None})


def main() -> None:
    """Draw the pictures, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="file written by `python -m benchmarks.disagg --matrix --json`")
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    args = parser.parse_args()
    values = values_of(args.rows)
    for mix in MIXES:
        draw(values, mix, args.folder / f"separation-{mix.replace('_', '-')}.svg")
    print(means(values), table(values), sep="\n\n")


if __name__ == "__main__":
    main()
