"""A process in which Triton interprets kernels on the CPU; it decides on import whether it does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TIMEOUT_S = 200.0

ENVIRONMENT = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}
"""The interpreter multiplies tiles by numpy, whose kernels for some CPUs (Haswell's, which Zen 5 gets) sum a row up by
where it stands in its matrix. GPUs do not, nor does this one, which every x86-64 CPU runs."""


def interpret(module: str, cases: Sequence[object], directory: Path) -> list[Any]:
    """The results of ``python -m MODULE QUESTIONS ANSWERS`` for some cases, which it reads from one file; it writes the
    results to another.
    """
    questions, answers = directory / "cases", directory / "outputs"
    torch.save(cases, questions)
    subprocess.run(
        [sys.executable, "-m", module, str(questions), str(answers)],
        env=os.environ | ENVIRONMENT,
        timeout=TIMEOUT_S,
        check=True,
    )
    outputs: list[Any] = torch.load(answers)
    return outputs
