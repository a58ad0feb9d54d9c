# SPDX-License-Identifier: Apache-2.0
"""The number of our files that load_gguf passes through is the length of the path for a reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf_files  # noqa: E402

SCRIPT = """
import os, sys
import lowbit

path, fuse, passed = sys.argv[1], sys.argv[2] == "True", set()
lowbit.load_gguf(path, fuse=fuse)
sys.setprofile(lambda frame, event, _: passed.add(frame.f_code.co_filename))
lowbit.load_gguf(path, fuse=fuse)
sys.setprofile(None)
home = os.path.dirname(lowbit.__file__)
print(*sorted(os.path.relpath(name, home) for name in passed if name.startswith(home)))
"""


@pytest.mark.parametrize(("fuse", "most"), [(False, 32), (True, 68)])
def test_load_gguf_passes_through_so_many_files(tmp_path: Path, python: Callable[..., str], fuse: bool, most: int) -> None:
    """In a process of its own: each package that was imported beside transformers is asked, too."""
    path = gguf_files.write(tmp_path / "model.gguf", "llama", words=True)
    passed = python(SCRIPT, str(path), str(fuse)).split()
    assert {"quant/load.py", "quant/kinds.py", "checkpoints/gguf/weights.py"} <= {*passed}
    assert len(passed) <= most, passed
