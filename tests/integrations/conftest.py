# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def joined(python: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """Run code in a fresh interpreter where lowbit is installed with its entry points, as pip does it."""
    entry = tmp_path / "lowbit_of_the_test-0.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: lowbit-of-the-test\nVersion: 0\n")
    (entry / "entry_points.txt").write_text("[bitsandbytes.backends]\nlowbit_of_the_test = lowbit_autoload:bitsandbytes\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return lambda code, *arguments, **environment: python(code, *arguments, PYTHONPATH=path, **environment)
