# SPDX-License-Identifier: Apache-2.0
"""`row = fixture_of(ROWS)`: the name of each of these kernel rows in turn; what this machine cannot run is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def name_or_skip(row: dict[str, object]) -> str:
    """Return the name of a row; one that cannot run is a skip with its reason."""
    if not row["available"]:
        pytest.skip(f"{row['name']}: {row['reason']}")
    return str(row["name"])


def fixture_of(rows: Sequence[dict[str, object]]) -> Any:
    @pytest.fixture(params=rows, ids=[str(row["name"]) for row in rows])
    def row(request: pytest.FixtureRequest) -> str:
        return name_or_skip(request.param)

    return row
