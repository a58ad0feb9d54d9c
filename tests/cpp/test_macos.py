# SPDX-License-Identifier: Apache-2.0
"""macOS on 64-bit Arm: what asks the system for something compiles by clang with PyPI's ziglang, and macOS has the functions
of C that it calls. Nothing runs."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
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
# Of C++ and the linker, not of C: names with namespaces and types, exceptions, the handle of a library.
NOT_OF_C = re.compile("__Z|___cxa_|___gxx_personality_v0$|__Unwind_|___dso_handle$")


def of_the_system(folder: str) -> set[str]:
    """The names that macOS's libSystem shows, by the stub that ziglang ships."""
    root = Path(folder) / "ziglang" if folder else Path(importlib.util.find_spec("ziglang").submodule_search_locations[0])
    return set(re.findall(r"[\s,\['](_[\w$]+)", (root / "lib/libc/darwin/libSystem.tbd").read_text()))


def undefined(file: bytes) -> set[str]:
    """The names that a 64-bit Mach-O file asks of others: its symbols that are global and in no section."""
    magic, _, _, _, commands = struct.unpack_from("<5I", file)
    assert magic == 0xFEEDFACF, f"no 64-bit Mach-O file: it begins with {magic:#x}"
    names, at = set(), 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", file, at)
        if command == 2:  # LC_SYMTAB
            symbols, count, strings, _ = struct.unpack_from("<4I", file, at + 8)
            for name, kind, *_ in struct.iter_unpack("<IBBHQ", file[symbols : symbols + 16 * count]):
                if kind == 1:  # N_UNDF | N_EXT, no entry of a debugger
                    names.add(file[strings + name : file.index(b"\0", strings + name)].decode())
        at += size
    return names


@pytest.mark.parametrize("unit", UNITS)
def test_sources_compile_and_call_what_macos_has(unit: str, tmp_path: Path) -> None:
    folder = os.environ.get("LOWBIT_TEST_ZIG", "")
    environment = os.environ | {"PYTHONPATH": folder, "ZIG_GLOBAL_CACHE_DIR": str(tmp_path)}
    if not folder and importlib.util.find_spec("ziglang") is None:
        pytest.skip("no ziglang on this machine: tools/test_env --only macos")
    source = tmp_path / "unit.cpp"
    source.write_text("".join(f'#include "{path}"\n' for path in UNITS[unit]))
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", f"-I{ROOT / 'python/lowbit/include'}"]
    command = [ROOT / "tools/macos_compiler", "c++", "-c", "-o", tmp_path / "unit.o", source, *flags]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    called = {name for name in undefined((tmp_path / "unit.o").read_bytes()) if not NOT_OF_C.match(name)}
    assert called and called <= of_the_system(folder), sorted(called - of_the_system(folder))
