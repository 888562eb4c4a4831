"""Pictures of how layouts served a load, as SVG; needs matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simulation.whatif.answer import Verdict

PANELS = (
    ("ttft", "first token, ms", (("ttft_p50_ms", "-", "median"), ("ttft_p90_ms", "--", "90 %"))),
    ("gaps", "gap between tokens, ms", (("itl_p50_ms", "-", "median"), ("itl_p99_ms", "--", "99 %"))),
    ("utilisation", "workers' time in steps, %", (("utilisation", "-", ""),)),
)
"""Each picture's file, its axis, and its lines: the name of a series, its line style, and its label."""


class PlotsUnavailableError(RuntimeError):
    """matplotlib is not installed, or the folder for the pictures cannot be made."""


def check_plots(folder: Path) -> None:
    """Make the folder for the pictures, and check that they can be drawn, before the simulations and not after them.

    Raises:
        PlotsUnavailableError: matplotlib is not installed, or the folder cannot be made.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise PlotsUnavailableError("--plots needs matplotlib: pip install 'baton-serve[plots]'") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlotsUnavailableError(f"--plots {folder}: the folder cannot be created: {error.strerror}") from error


def draw(verdicts: Sequence[Verdict], folder: Path) -> list[Path]:
    """Write a picture for each of ``PANELS`` into a folder, which is created. Equal verdicts give equal bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    with mpl.rc_context({"svg.hashsalt": "baton", "svg.fonttype": "none"}):
        for name, title, lines in PANELS:
            figure = Figure(figsize=(8, 4), layout="constrained")
            axes = figure.add_subplot()
            for number, verdict in enumerate(verdicts):
                for values, style, label in lines:
                    axes.plot(
                        verdict.series.middles_s,
                        getattr(verdict.series, values),
                        style,
                        color=f"C{number % 10}",
                        label=f"{verdict.layout} {label}".strip(),
                    )
            axes.set(xlabel="seconds", ylabel=title)
            axes.set_ylim(bottom=0)
            axes.legend(fontsize="small")
            axes.grid(alpha=0.3)
            file = folder / f"{name}.svg"
            figure.savefig(file, format="svg", metadata={"Date": None})
            files.append(file)
    return files
