# SPDX-License-Identifier: Apache-2.0
"""The tests that a run takes.

A test function is a kind of check; its parameters are variants of it. `pytest` alone runs every kind of check once: the
functions marked `core` with all their variants (every kernel row against float64), of each other function one variant
and of the rest one in QUICK. `--share N` runs one in N of the rest and `--everything` all. Tests named by a path, -k or
-m run whole.

The core and the one variant of each function are the same on every commit, by a hash of the test's id. The rest
rotates, by a hash of the id and a seed: the date (UTC), or what `--share-seed` says. The end of a run prints it, and
`--share-seed` repeats it on other commits, as a bisect needs. Every kernel row gets its turn, which a counter does not
give (it meets the same rows again where their number is a multiple of N).
"""

from __future__ import annotations

import hashlib
import os
import unittest
from collections.abc import Iterable
from datetime import datetime, timezone

import pytest

QUICK = 12
SEED = "LOWBIT_TEST_SEED"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("share", "which variants of tests run (tests/share.py)")
    group.addoption("--share", type=_count, metavar="N", help=f"one variant in N, and one of each test function; {QUICK} where no test is named")
    group.addoption("--share-seed", metavar="TEXT", help="which variants of the rest; the date where nothing is said, and printed at the end of a run")
    group.addoption("--everything", action="store_const", dest="share", const=1, help="every variant of every test")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(text)
    return int(text)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Settle the share; a run of the suite takes every core (`-n` says otherwise), where pytest-xdist is there."""
    option = config.option
    if hasattr(config, "workerinput"):
        option.share = config.workerinput["share"]
        return
    whole_suite = config.args_source != config.ArgsSource.ARGS and not option.keyword and not option.markexpr
    if whole_suite and getattr(option, "numprocesses", 0) is None and not option.collectonly and not option.usepdb:
        option.numprocesses, option.dist = "auto", "worksteal"
    if option.share is None:
        option.share = QUICK if whole_suite else 1
    os.environ[SEED] = option.share_seed or os.environ.get(SEED) or f"{datetime.now(timezone.utc):%Y-%m-%d}"  # for workers and nested runs


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """A worker of xdist reads the command line anew, and would not know what was settled."""
    node.workerinput["share"] = node.config.option.share


def chosen(items: Iterable[pytest.Item], share: int, seed: str) -> list[pytest.Item]:
    """All that are core, one of each function (one that can run here, if there is one), and by the seed one in `share` of the items."""
    items = list(items)
    first: dict[str, pytest.Item] = {}
    for item in sorted(items, key=lambda item: (not _can_run(item), _number(item.nodeid))):
        first.setdefault(_kind(item), item)
    taken = set(first.values())
    if "LOWBIT_TEST_DEVICE" not in os.environ:  # what core tests promise, they promise of rows of the CPU
        taken |= {item for item in items if item.get_closest_marker("core")}
    return [item for item in items if item in taken or _number(f"{seed} {item.nodeid}") * share < 1]


def _kind(item: pytest.Item) -> str:
    """The function; of torch's own tests, whose parameters are part of a method's name, the class."""
    is_torchs = issubclass(getattr(item, "cls", None) or object, unittest.TestCase)
    return item.nodeid.rpartition("::")[0] if is_torchs else item.nodeid.partition("[")[0]


def _number(text: str) -> float:
    """Between 0 and 1. A smaller share is a part of a larger one."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def _can_run(item: pytest.Item) -> bool:
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return all(param.get("available", True) for param in params if isinstance(param, dict))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    taken = chosen(items, config.option.share, os.environ[SEED])
    left = set(items).difference(taken)
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
    config.stash[_LEFT_OUT] = len(left)
    items[:] = taken


_LEFT_OUT = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    node.config.stash[_LEFT_OUT] = node.workeroutput["left_out"] if hasattr(node, "workeroutput") else 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    if config.option.share == 1:
        return
    terminalreporter.write_line(
        f"share: one variant in {config.option.share} (by --share-seed {os.environ[SEED]}): {config.stash.get(_LEFT_OUT, 0)} left out; all run by pytest --everything"
    )
