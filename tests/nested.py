# SPDX-License-Identifier: Apache-2.0
"""A run of pytest in a process of its own, for tests that need another environment or a device that cannot be switched off.

`checks` lists the test functions of such files as parameters, so that each can be chosen and fails by its name:

    @pytest.mark.parametrize("check", checks(*HERE.glob("check_*.py")), ids=str)
    def test_checks(check: Check, passes: Callable[..., Run]) -> None:
        passes(check, LOWBIT_ISA="scalar")

A file runs once for each environment, with those of its functions that this run has chosen.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import warm
from skips import NESTED, reason_of, reasons_of

TELL = "LOWBIT_TEST_TELL"
"""The file in which a nested run leaves what the outer one counts and what became of each function."""
NARROWED = shlex.split(os.environ.get("LOWBIT_TEST_NESTED", ""))
"""Arguments of every nested run: `-k float8_e5m2`."""
NOT_CHOSEN = "LOWBIT_TEST_NESTED chooses no variant of it"


@dataclass(frozen=True)
class Run:
    code: int
    said: str
    errors: str
    functions: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Of each function its variants that "passed", "failed" and were "skipped": the texts."""
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> int:
        found = re.search(r"(\d+) passed", self.said)
        return int(found[1]) if found else 0

    def __str__(self) -> str:
        return f"exit {self.code}\n{self.said[-8000:]}{self.errors[-4000:]}"


@dataclass(frozen=True)
class Check:
    file: Path
    function: str

    def __str__(self) -> str:
        return f"{self.file.stem}-{self.function.removeprefix('test_')}"


def checks(*files: Path) -> list[Check]:
    """The test functions of these files, which nothing imports here."""
    found = ((file, node) for file in sorted(files) for node in ast.parse(file.read_text()).body)
    return [Check(file, node.name) for file, node in found if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


_functions: dict[str, dict[str, list[str]]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In a nested run: what the outer one says of each function."""
    if report.when == "call" or not report.passed:
        text = reason_of(report) if report.skipped else f"{report.nodeid} ({report.when})\n{report.longreprtext}"
        of = _functions.setdefault(report.nodeid.partition("[")[0].rpartition("::")[2], {})
        of.setdefault(report.outcome, []).append(text)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (file := os.environ.get(TELL)) and not hasattr(session.config, "workerinput"):
        Path(file).write_text(json.dumps({"skipped": reasons_of(session.config), "functions": _functions}))


@pytest.fixture
def nested(request: pytest.FixtureRequest, tmp_path: Path, record_property: Callable[[str, object], None]) -> Callable[..., Run]:
    """Run pytest over files, by the share of this run if none is given; what was skipped there counts here."""
    skipped: Counter[str] = Counter()

    def run(*arguments: str | Path, share: int | None = None, timeout: float = 900, **environment: str) -> Run:
        told = tmp_path / "told.json"
        of_run = ["--share", str(share or request.config.option.share)]
        without = (f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "hypothesispytest"))  # the last takes a second to begin
        command = ["-m", "pytest", "-q", *without, "--tb=short", *of_run, *NARROWED, *map(str, arguments)]
        done = warm.run(*command, timeout=timeout, **environment, **{TELL: str(told)})
        found = json.loads(told.read_text()) if told.exists() else {"skipped": {}, "functions": {}}
        skipped.update(found["skipped"])
        return Run(done.returncode, done.stdout, done.stderr, **found)

    run.skipped = skipped  # type: ignore[attr-defined]
    yield run
    if skipped:
        record_property(NESTED, dict(skipped))


@pytest.fixture
def passes(request: pytest.FixtureRequest, nested: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Fail or skip as a check did. The first check of a file runs it for all, whichever worker of xdist has them."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if hasattr(request.config, "workerinput") else base  # the environment says it in nested runs too

    def run(check: Check, **environment: str) -> Run:
        chosen = [item.callspec.params.get("check") for item in request.session.items if hasattr(item, "callspec")]
        functions = [other.function for other in chosen if isinstance(other, Check) and other.file == check.file]
        told = {name: value for name, value in environment.items() if name != "LOWBIT_CACHE_DIR"}  # which each worker makes
        key = hashlib.sha256(json.dumps([str(check.file), told, NARROWED], sort_keys=True).encode()).hexdigest()[:16]
        kept = folder / f"nested_{key}.json"
        with kept.with_suffix(".lock").open("w") as lock:
            import fcntl  # Windows, where tests/cpp/test_windows.py runs tests of ops, has none

            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_text(json.dumps(asdict(nested("-svv", *(f"{check.file}::{name}" for name in dict.fromkeys(functions)), **environment))))
                nested.skipped.clear()  # type: ignore[attr-defined]
        done = Run(**json.loads(kept.read_text()))
        found = done.functions.get(check.function, {})
        assert "failed" not in found, "\n".join(found["failed"])
        if not found and NARROWED and done.passed:
            pytest.skip(NOT_CHOSEN)
        skipped = found.get("skipped", []) or list(done.skipped if not done.functions else ())  # the whole file
        if "passed" not in found and skipped:
            pytest.skip(skipped[0])
        assert "passed" in found and done.code in (0, 1), str(done)  # else the process died before or in this function
        nested.skipped.update(skipped)  # type: ignore[attr-defined]
        return done

    return run
