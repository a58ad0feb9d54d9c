# SPDX-License-Identifier: Apache-2.0
"""`row`: each row of oneDNN, where its library is there; a fake library is tested without it."""

from __future__ import annotations

import pytest
from onednn_cases import FORMATS, needs_row


@pytest.fixture(params=FORMATS)
def row(request: pytest.FixtureRequest) -> str:
    needs_row(request.param)
    return str(request.param)


@pytest.fixture
def onednn() -> None:
    """The test needs the library, and its product of float32, which most machines have."""
    needs_row("linear_float32_onednn")
