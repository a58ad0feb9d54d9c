# SPDX-License-Identifier: Apache-2.0
"""`row`: each row of oneDNN, where its library is there; a fake library is tested without it."""

from __future__ import annotations

import pytest

from lowbit import _C

ROWS = ("linear_float32_onednn", "linear_bfloat16_onednn", "linear_int8_int8_onednn")


def needs_onednn() -> None:
    if reason := _C.onednn.facts()["reason"]:
        pytest.skip(reason)


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> str:
    needs_onednn()
    return str(request.param)


@pytest.fixture
def onednn() -> None:
    """The test needs the library."""
    needs_onednn()
