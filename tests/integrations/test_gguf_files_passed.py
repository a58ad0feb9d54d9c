# SPDX-License-Identifier: Apache-2.0
"""The number of our files that load_gguf passes through is the length of the path for a reader."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import lowbit

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf_files  # noqa: E402


def files_passed(call: Any) -> set[str]:
    home, passed = os.path.dirname(lowbit.__file__), set()

    def note(frame: Any, event: str, _: Any) -> None:
        passed.add(os.path.relpath(frame.f_code.co_filename, home))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return {name for name in passed if not name.startswith("..") and name.endswith(".py")}


@pytest.mark.parametrize(("fuse", "most"), [(False, 28), (True, 45)])
def test_load_gguf_passes_through_so_many_files(tmp_path: Path, fuse: bool, most: int) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", "llama", words=True)
    lowbit.load_gguf(path, fuse=fuse)
    passed = files_passed(lambda: lowbit.load_gguf(path, fuse=fuse))
    assert {"quant/load.py", "quant/kinds.py", "integrations/gguf/weights.py"} <= passed
    assert len(passed) <= most, sorted(passed)
