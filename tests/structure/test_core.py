# SPDX-License-Identifier: Apache-2.0
"""Every kernel row of this machine meets a test against float64 in every run, and shares of the other tests have no pattern."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from share import chosen

from lowbit import _C, testing

TESTS = Path(__file__).parents[1]
CODE = """
import json, sys
import pytest
class Rows:
    names = set()
    def pytest_collection_finish(self, session):
        for item in session.items:
            params = item.callspec.params.values() if hasattr(item, "callspec") else ()
            self.names.update(item.get_closest_marker("core").args)
            self.names.update(str(param["name"]) if isinstance(param, dict) else str(param) for param in params)
code = pytest.main(["--collect-only", "-qq", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "core", *sys.argv[1:]], plugins=[Rows()])
print(json.dumps(sorted(Rows.names)))
sys.exit(code)
"""


def test_every_row_of_every_op_has_a_core_test(python: Callable[..., str]) -> None:
    files = [str(path) for room in ("ops", "score", "reference", "onednn", "checkpoints") for path in (TESTS / room).glob("test_*.py") if "mark.core" in path.read_text()]
    covered = set(json.loads(python(CODE, *files).splitlines()[-1]))
    rows = {str(row["name"]) for op in _C.OPS for row in testing.rows(op) if row["available"]}
    assert len(rows) > len(_C.OPS) and not rows - covered, sorted(rows - covered)


ROWS, CASES = 38, 30
MANY = [f"test_linear.py::test_{case}[row{row}]" for case in range(CASES) for row in range(ROWS)]


@pytest.fixture
def items() -> list[pytest.Item]:
    class Item(SimpleNamespace):
        __hash__ = object.__hash__

    return [Item(nodeid=nodeid, get_closest_marker=lambda name: None) for nodeid in MANY]


def test_a_share_has_each_function_and_no_row_less_than_others(items: list[pytest.Item]) -> None:
    taken = [item.nodeid for item in chosen(items, 3, "a seed")]
    assert len(MANY) / 4 < len(taken) < len(MANY) / 2
    assert {nodeid.partition("[")[0] for nodeid in taken} == {nodeid.partition("[")[0] for nodeid in MANY}
    of_rows = Counter(nodeid.partition("[")[2] for nodeid in taken)
    assert len(of_rows) == ROWS and max(of_rows.values()) < CASES, of_rows  # a counter takes a third of the rows, always


def test_another_seed_has_another_rest_and_a_smaller_share_is_part_of_a_larger(items: list[pytest.Item]) -> None:
    small, large, other = (set(chosen(items, *how)) for how in ((12, "a seed"), (3, "a seed"), (12, "another")))
    assert small < large and small != other and len(small | other) > 1.5 * len(small)
    assert set(chosen(items, 1, "a seed")) == set(items)


def test_every_seed_has_the_same_variant_of_each_function(items: list[pytest.Item]) -> None:
    fixed = set(chosen(items, 10**9, "a seed"))
    assert len(fixed) == CASES
    assert all(fixed <= set(chosen(items, share, f"seed {share}")) for share in (2, 12, 10**9))


def test_core_tests_and_what_can_run_here_come_first(items: list[pytest.Item]) -> None:
    items[7].get_closest_marker = lambda name: object()
    for item in items[:ROWS]:
        item.callspec = SimpleNamespace(params={"row": {"available": item is items[9]}})
    taken = chosen(items, 10**9, "a seed")
    assert items[7] in taken and items[9] in taken and len(taken) == CASES + 1
