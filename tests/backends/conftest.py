# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from packages import Packages  # noqa: E402


@pytest.fixture
def packages(tmp_path: Path) -> Packages:
    return Packages(tmp_path)
