# SPDX-License-Identifier: Apache-2.0
"""Processes of one call without torch, for tests of what a recorder leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CALL = "import numpy; from lowbit import _C; _C.all_finite(numpy.ones(3, numpy.float32));"


def surroundings(**environment: str) -> dict[str, str]:
    """The environment of this process, with these variables of the recorder and no others."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LOWBIT_RECORD")} | environment


def child(code: str, folder: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code without torch, its recorder in the folder; on, unless the environment says otherwise."""
    chosen = surroundings(**{"LOWBIT_RECORD": "1", "LOWBIT_RECORD_DIR": str(folder), **environment})
    hide_torch = "import sys; sys.modules['torch'] = None;"
    return subprocess.run(
        [sys.executable, "-c", hide_torch + code], env=chosen, capture_output=True, text=True, timeout=60, check=False
    )
