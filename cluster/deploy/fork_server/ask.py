"""Asks a fork server for a process that goes on with a command; runs the command itself if none comes.

A raylet runs this file as a script in place of a worker's command: `python -IS ask.py SOCKET COMMAND...`. Imports only
what is quick to load.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys

TIMEOUT_S = 120.0
"""How long a fork is waited for: the server may still load modules."""

FORKED = b"forked"
LENGTH = struct.Struct("!I")
STANDARD_FILES = (0, 1, 2)

SET_UP = "setup_worker.py"
"""Ray's script that prepares a runtime environment and then runs the worker's script."""

ENVIRONMENT_OPTION = "--serialized-runtime-env-context"
LANGUAGE_OPTION = "--language="
"""Options for ``SET_UP``; the first is there if a worker has a runtime environment of its own."""


def without_set_up(command: list[str]) -> list[str]:
    """A worker's command without Ray's script that prepares it, unless the worker has a runtime environment.

    A raylet leaves the script out itself, but only where it stands second in the command.
    """
    has_environment = any(argument.startswith(ENVIRONMENT_OPTION) for argument in command)
    if has_environment or not command[1].endswith(SET_UP):
        return command
    return [command[0], *(argument for argument in command[2:] if not argument.startswith(LANGUAGE_OPTION))]


def ask_for_fork(path: str, script: list[str]) -> bool:
    """Hand this process's environment, files and limits over to a fork that runs a script. False: there is none."""
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    place = {
        "script": script,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "limits": [(name, *resource.getrlimit(getattr(resource, name))) for name in limits],
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    content = json.dumps(place).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(path)
            socket.send_fds(connection, [LENGTH.pack(len(content))], STANDARD_FILES)
            connection.sendall(content)
            return connection.recv(len(FORKED)) == FORKED
        except OSError:
            return False


def main() -> None:
    """Run the command that this process's arguments name, in a fork or here."""
    path, *command = sys.argv[1:]
    command = without_set_up(command)
    is_script = command[1].endswith(".py") and not command[1].endswith(SET_UP)
    if not (is_script and ask_for_fork(path, command[1:])):
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
