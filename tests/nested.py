# SPDX-License-Identifier: Apache-2.0
"""A run of pytest in a process of its own, for tests that need another environment or a device that cannot be switched off."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from skips import NESTED, reasons_of

TELL = "LOWBIT_TEST_TELL"
"""The file in which a nested run leaves what the outer one counts."""
NARROWED = shlex.split(os.environ.get("LOWBIT_TEST_NESTED", ""))
"""Arguments of every nested run: `-k float8_e5m2`."""


@dataclass(frozen=True)
class Run:
    code: int
    said: str
    errors: str

    @property
    def passed(self) -> int:
        found = re.search(r"(\d+) passed", self.said)
        return int(found[1]) if found else 0

    def __str__(self) -> str:
        return f"exit {self.code}\n{self.said[-8000:]}{self.errors[-4000:]}"


def at_least(count: int) -> int:
    """How many tests of a nested run must pass: one, where LOWBIT_TEST_NESTED chooses some."""
    return 1 if NARROWED else count


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (file := os.environ.get(TELL)) and not hasattr(session.config, "workerinput"):
        Path(file).write_text(json.dumps(reasons_of(session.config)))


@pytest.fixture
def nested(request: pytest.FixtureRequest, tmp_path: Path, record_property: Callable[[str, object], None]) -> Callable[..., Run]:
    """Run pytest over files, by the share of this run if none is given; what was skipped there counts here."""
    skipped: Counter[str] = Counter()

    def run(*arguments: str | Path, share: int | None = None, timeout: float = 900, **environment: str) -> Run:
        told = tmp_path / "told.json"
        of_run = ["--share", str(share or request.config.option.share)]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", *of_run, *NARROWED, *map(str, arguments)]
        merged = os.environ | environment | {TELL: str(told)}
        done = subprocess.run(command, env=merged, capture_output=True, text=True, timeout=timeout, check=False)
        if told.exists():
            skipped.update(json.loads(told.read_text()))
        return Run(done.returncode, done.stdout, done.stderr)

    run.skipped = skipped  # type: ignore[attr-defined]
    yield run
    if skipped:
        record_property(NESTED, dict(skipped))
