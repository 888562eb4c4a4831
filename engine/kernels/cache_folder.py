"""Where compiled kernels are kept."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile


def cache_folder(wanted: str) -> Path | None:
    """A folder in ``wanted``, if that is not empty and can be written; else beside this file or in the user's caches.

    numba compiles anew when the file of a function changes, and would not see a change in what it calls from other
    files: each state of this package has a folder of its own.

    Returns:
        None if no place can be written; all that costs is compiling at every start.
    """
    package = Path(__file__).parent
    sources = b"".join(source.read_bytes() for source in sorted(package.glob("*.py")))
    name = f"baton-kernels-{blake2b(sources, digest_size=8).hexdigest()}"
    beside, of_user = package / "__pycache__", Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    for place in (Path(wanted), beside, of_user) if wanted else (beside, of_user):
        try:
            folder = place.expanduser() / name
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except (OSError, RuntimeError):  # RuntimeError: this user has no home
            continue
        return folder
    return None
