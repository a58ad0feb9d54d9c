# SPDX-License-Identifier: Apache-2.0
"""The SPIR-V of the library is what its sources give, small, and what old drivers read."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zlib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from modules import ROOT

from lowbit import _C

FILES = sorted((ROOT / "csrc" / "level_zero" / "spirv").glob("*.columns"))
MOST_BYTES = 450_000
"""Of all modules as a wheel has them, deflated."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    loader = SourceFileLoader("tools_spirv", str(ROOT / "tools" / "spirv"))
    made = module_from_spec(spec_from_loader(loader.name, loader))
    wrote, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(made)
    finally:
        sys.dont_write_bytecode = wrote
    return made


def test_modules_are_small() -> None:
    assert FILES and sum(len(zlib.compress(path.read_bytes())) for path in FILES) < MOST_BYTES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_library_reads_what_the_tool_wrote(path: Path, tool: ModuleType) -> None:
    """Columns are written in one way alone: the same columns are the same words."""
    module = _C.level_zero.module(path.stem)
    assert tool.by_columns(module) == path.read_bytes()
    version = bytes([0, 2, 1, 0])  # 1.2: what old drivers read
    assert module[:4] == bytes.fromhex("03022307") and module[4:8] <= version


def test_every_number_comes_back(tool: ModuleType) -> None:
    """Also what no module has: differences of 2^31 and more, in words that are as large."""
    words = [0x07230203, 0x10200, 0, 0xFFFFFFFF, 0x80000000]
    words += [4 << 16 | 43, 1, 0x7FFFFFFF, 0x80000000, 4 << 16 | 43, 0xFFFFFFFF, 0, 0x80000001, 11 << 16 | 0xFFFF, *range(2**32 - 10, 2**32)]
    module = b"".join(word.to_bytes(4, "little") for word in words)
    assert _C.level_zero.from_columns(tool.by_columns(module)) == module


def test_columns_that_are_cut_off_are_told(tool: ModuleType) -> None:
    columns = FILES[0].read_bytes()
    for length in (0, 1, 2, 100, len(columns) - 1):
        with pytest.raises(RuntimeError, match="level_zero: the columns of a module are cut off"):
            _C.level_zero.from_columns(columns[:length])


def test_a_module_that_is_not_there_is_told() -> None:
    assert _C.level_zero.modules() == [path.stem for path in FILES]
    with pytest.raises(KeyError, match="there is none of the name 'nothing'"):
        _C.level_zero.module("nothing")


@pytest.mark.skipif(shutil.which("llvm-spirv-15") is None or shutil.which("clang-15") is None, reason="clang-15 or llvm-spirv-15 is not there")
def test_modules_are_what_their_sources_give() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "spirv"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
