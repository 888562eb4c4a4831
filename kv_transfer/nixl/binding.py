"""The names of the NIXL package that Baton uses; the only file that imports it.

Importing NIXL replaces logging settings of the whole process: what it changed is put back here.
"""

from __future__ import annotations

import logging
import os

_RAISE_EXCEPTIONS = logging.raiseExceptions

from nixl._api import nixl_agent, nixl_agent_config, nixl_xfer_handle  # noqa: E402
from nixl._bindings import (  # noqa: E402
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)

logging.raiseExceptions = _RAISE_EXCEPTIONS
if "NIXL_LOG_LEVEL" not in os.environ:
    # NIXL's logger writes INFO to standard output, where the answer of `baton generate` belongs.
    logging.getLogger("nixl").setLevel(logging.WARNING)

NIXL_ERRORS: tuple[type[Exception], ...] = (
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)

__all__ = ["NIXL_ERRORS", "nixl_agent", "nixl_agent_config", "nixl_xfer_handle"]
