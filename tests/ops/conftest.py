# SPDX-License-Identifier: Apache-2.0
"""Fixture: `score_row` walks every row of the op score_program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lowbit import _C, testing


@pytest.fixture(params=testing.rows("score_program"), ids=lambda row: str(row["name"]))
def score_row(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every row of the op, forced; what ran is checked."""
    if not request.param["available"]:
        pytest.skip(f"{request.param['name']}: {request.param['reason']}")
    name = str(request.param["name"])
    dtype = request.node.callspec.params.get("dtype", torch.float32)
    if (dtype == torch.float64) != ("_float64_" in name):
        pytest.skip(f"{name}: is for {'float64' if dtype != torch.float64 else 'other'} scores")
    previous = _C.force_kernel(name)
    yield name
    _C.force_kernel(previous)
    assert _C.last_kernel("score_program") == name
