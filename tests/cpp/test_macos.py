# SPDX-License-Identifier: Apache-2.0
"""macOS on 64-bit Arm: what asks the system for something compiles by clang with PyPI's ziglang. Nothing runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
# Files of a list are one translation unit.
UNITS = {
    "core": [*sorted(CSRC.glob("core/*.cpp")), *(CSRC / f"core/os/{name}.cpp" for name in ("posix", "macos"))],
    "external": sorted(CSRC.glob("external/*.cpp")),
    "sim": sorted(CSRC.glob("sim/*.cpp")),
    **{f"recorder/{name}": [CSRC / f"recorder/{name}.cpp"] for name in ("folder", "ring", "watcher")},
}


@pytest.mark.parametrize("unit", UNITS)
def test_sources_compile(unit: str, tmp_path: Path) -> None:
    folder = os.environ.get("LOWBIT_TEST_ZIG", "")
    environment = os.environ | {"PYTHONPATH": folder, "ZIG_GLOBAL_CACHE_DIR": str(tmp_path)}
    if not folder and importlib.util.find_spec("ziglang") is None:
        pytest.skip("no ziglang on this machine: tools/test_env --only macos")
    source = tmp_path / "unit.cpp"
    source.write_text("".join(f'#include "{path}"\n' for path in UNITS[unit]))
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", f"-I{ROOT / 'python/lowbit/include'}"]
    command = [ROOT / "tools/macos_compiler", "c++", "-c", "-o", tmp_path / "unit.o", source, *flags]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "unit.o").exists(), done.stderr
