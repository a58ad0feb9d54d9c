# SPDX-License-Identifier: Apache-2.0
"""`row`: each row of oneDNN, where its library is there; a fake library is tested without it."""

from __future__ import annotations

import pytest
from onednn_cases import FORMATS, served

from lowbit import _C


def needs_onednn() -> None:
    if reason := _C.onednn.facts()["reason"]:
        pytest.skip(reason)


def needs_row(row: str) -> None:
    needs_onednn()
    if not served(row):
        pytest.skip(f"oneDNN {_C.onednn.facts()['version']} has no {row} on this machine")


@pytest.fixture(params=FORMATS)
def row(request: pytest.FixtureRequest) -> str:
    needs_row(request.param)
    return str(request.param)


@pytest.fixture
def onednn() -> None:
    """The test needs the library, and its product of float32, which most machines have."""
    needs_row("linear_float32_onednn")
