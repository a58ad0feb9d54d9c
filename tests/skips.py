# SPDX-License-Identifier: Apache-2.0
"""The skipped tests with their reasons, as a table at the end of a run; a reason that is not in known_skips.txt fails the run.

Skips of nested runs (tests/nested.py) count too.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("known_skips.txt")
NESTED = "skips of a nested run"
_SEEN = pytest.StashKey[dict[str, Counter[str]]]()


def known() -> list[tuple[re.Pattern[str], str]]:
    """Each line of the list: the pattern of a reason, and why a test may be skipped for it."""
    lines = (line for line in LIST.read_text().splitlines() if line.strip() and not line.startswith("#"))
    return [(re.compile(pattern.strip()), why.strip()) for pattern, _, why in (line.partition("  # ") for line in lines)]


def by_line(reasons: Counter[str]) -> tuple[Counter[str], Counter[str]]:
    """Skips counted by what the list says of their reasons, and those of which it says nothing."""
    told, unknown = Counter[str](), Counter[str]()
    lines = known()
    for reason, count in reasons.items():
        why = next((why for pattern, why in lines if pattern.search(reason)), None)
        (unknown if why is None else told)[reason if why is None else why] += count
    return told, unknown


def reasons_of(config: pytest.Config) -> Counter[str]:
    return sum(config.stash.get(_SEEN, {}).values(), Counter())


def _note(config: pytest.Config, nodeid: str, reasons: Counter[str]) -> None:
    config.stash.setdefault(_SEEN, {})[nodeid] = reasons  # a file that skips is told once by each worker


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)


class Skips:
    """Listens to the reports of a run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            _note(self.config, report.nodeid, Counter({reason_of(report): 1}))
        for name, reasons in report.user_properties:
            if name == NESTED and report.when == "teardown":
                _note(self.config, f"nested in {report.nodeid}", Counter(reasons))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            _note(self.config, report.nodeid, Counter({reason_of(report): 1}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if by_line(reasons_of(self.config))[1] and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        told, unknown = by_line(reasons_of(self.config))
        if told or unknown:
            terminalreporter.section("skipped")
        for text, count in told.most_common():
            terminalreporter.write_line(f"{count:6}  {text}")
        for reason, count in unknown.most_common():
            terminalreporter.write_line(f"{count:6}  {reason}  <- not in tests/{LIST.name}: the run fails", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(config), "lowbit skips")
