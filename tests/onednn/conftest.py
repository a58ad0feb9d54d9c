# SPDX-License-Identifier: Apache-2.0
"""`onednn`: the test needs the library, and its product of float32; a fake library is tested without it."""

from __future__ import annotations

import pytest

from lowbit import _C, testing
from lowbit.testing import LinearCase


@pytest.fixture
def onednn() -> None:
    facts = _C.onednn.facts()
    if reason := facts["reason"]:
        pytest.skip(reason)
    if not testing.serves("linear_float32_onednn", LinearCase(5, 37, 70, "float32", "float32")):
        pytest.skip(f"oneDNN {facts['version']} has no linear_float32_onednn on this machine")
