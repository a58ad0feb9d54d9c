# SPDX-License-Identifier: Apache-2.0
"""write_whole: a text file that is there as a whole or not at all, also where the process is killed."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` by way of a file beside it; a file that is there is replaced. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
