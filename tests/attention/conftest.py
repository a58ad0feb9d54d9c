# SPDX-License-Identifier: Apache-2.0
"""Fixtures: every row of attention_forward and attention_backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lowbit
from lowbit import testing


def _rows(op: str) -> list[dict[str, object]]:
    return [row for row in testing.rows(op) if str(row["name"]).startswith(f"{op}_float32")]


@pytest.fixture(params=_rows("attention_forward"), ids=lambda row: str(row["name"]))
def forward_row(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one row of the forward; a row that this machine cannot run is a skip with its reason."""
    yield from _force(request.param)


@pytest.fixture(params=_rows("attention_backward"), ids=lambda row: str(row["name"]))
def backward_row(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one row of the backward."""
    yield from _force(request.param)


def _force(row: dict[str, object]) -> Iterator[str]:
    if not row["available"]:
        pytest.skip(f"{row['name']}: {row['reason']}")
    with lowbit.force_kernel(str(row["name"])):
        yield str(row["name"])
