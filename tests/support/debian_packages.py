"""Programs from Debian packages that tests need."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

INSTALL_TIMEOUT_S = 300.0

CHROMIUM = Path("/usr/bin/chromium")
"""The executable of the package chromium."""


def install(packages: Sequence[str]) -> str | None:
    """Install Debian packages without starting their services; returns the reason if that failed. Needs root."""
    if shutil.which("apt-get") is None:
        return f"with something else than apt-get: {' '.join(packages)}"
    policy = Path("/usr/sbin/policy-rc.d")
    is_ours = not policy.exists()
    if is_ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *packages]):
            result = subprocess.run(
                ["apt-get", "-o", "Acquire::http::Timeout=20", *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
                check=False,
            )
        return None if result.returncode == 0 else f"apt-get failed: {result.stderr.strip()[-500:]}"
    except subprocess.TimeoutExpired:
        return f"apt-get did not end within {INSTALL_TIMEOUT_S:.0f} s"
    finally:
        if is_ours:
            policy.unlink()
