# SPDX-License-Identifier: Apache-2.0
"""`row`: each row of oneDNN, where its library is there; a fake library is tested without it."""

from __future__ import annotations

import pytest
from onednn_cases import FORMATS, served

from lowbit import _C


def needs_onednn() -> None:
    if reason := _C.onednn.facts()["reason"]:
        pytest.skip(reason)


@pytest.fixture(params=FORMATS)
def row(request: pytest.FixtureRequest) -> str:
    needs_onednn()
    if not served(request.param):
        pytest.skip(f"oneDNN {_C.onednn.facts()['version']} has no {request.param} on this machine")
    return str(request.param)


@pytest.fixture
def onednn() -> None:
    """The test needs the library."""
    needs_onednn()
