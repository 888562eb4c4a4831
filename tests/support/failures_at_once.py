"""What failed in a run of tests, told as soon as it did: a run that is killed has no summary."""

from __future__ import annotations

import pytest


class FailuresAtOnce:
    """Prints each failure of a run in several processes when it is known."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a failure with its traceback."""
        if report.failed:
            self._terminal.write_line("")
            self._terminal.write_sep("_", f"{report.when or ''} {report.nodeid}".strip(), red=True)
            self._terminal.write_line(report.longreprtext)
