# SPDX-License-Identifier: Apache-2.0
"""Fixture: `score_row` walks every row of the op score_program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from row_fixture import name_or_skip
from settings import forced

from lowbit import testing


@pytest.fixture(params=testing.rows("score_program"), ids=lambda row: str(row["name"]))
def score_row(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every row of the op, forced; what ran is checked."""
    name = name_or_skip(request.param)
    with forced(name):
        yield name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Float64 scores have a row of their own: `dtype`, where a test has it, is that of its scores."""
    items[:] = [item for item in items if _serves(getattr(getattr(item, "callspec", None), "params", {}))]


def _serves(params: dict[str, object]) -> bool:
    row = params.get("score_row")
    return row is None or ("_float64_" in str(row["name"])) == (params.get("dtype", torch.float32) == torch.float64)
