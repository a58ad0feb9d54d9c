# SPDX-License-Identifier: Apache-2.0
"""Tests of what this process records, and of its reports."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def recording(recorder_on: None) -> None:
    """All of them have a recorder."""
