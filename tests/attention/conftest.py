# SPDX-License-Identifier: Apache-2.0
"""Fixtures: every row of attention_forward and attention_backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lowbit
from lowbit import testing


KINDS = ("float32", "bfloat16", "float16")


def _rows(op: str, kinds: tuple[str, ...]) -> list[dict[str, object]]:
    return [row for row in testing.rows(op) if str(row["name"]).startswith(tuple(f"{op}_{kind}" for kind in kinds))]


@pytest.fixture(params=_rows("attention_forward", ("float32",)), ids=lambda row: str(row["name"]))
def forward_row(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one row of the forward for float32; a row that this machine cannot run is a skip with its reason."""
    yield from _force(request.param)


@pytest.fixture(params=_rows("attention_forward", KINDS), ids=lambda row: str(row["name"]))
def any_forward_row(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one row of the forward, of those for one dtype alone too (`testing.attention_dtypes`)."""
    yield from _force(request.param)


@pytest.fixture(params=_rows("attention_backward", KINDS), ids=lambda row: str(row["name"]))
def any_backward_row(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one row of the backward, likewise."""
    yield from _force(request.param)


@pytest.fixture(params=_rows("attention_backward", ("float32",)), ids=lambda row: str(row["name"]))
def backward_row(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force one row of the backward for float32."""
    yield from _force(request.param)


def _force(row: dict[str, object]) -> Iterator[str]:
    if not row["available"]:
        pytest.skip(f"{row['name']}: {row['reason']}")
    with lowbit.force_kernel(str(row["name"])):
        yield str(row["name"])
