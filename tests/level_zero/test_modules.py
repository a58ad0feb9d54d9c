# SPDX-License-Identifier: Apache-2.0
"""The SPIR-V of the library is what its sources give, small, and what old drivers read."""

from __future__ import annotations

import argparse
import re
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

SOURCES = sorted((ROOT / "csrc" / "level_zero").glob("*/*.spirv.cpp"))
NAMES = [path.name.removesuffix(".spirv.cpp") for path in SOURCES]
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


def clang_tools() -> dict[str, str]:
    """The tools that made the modules of this library, where they are still here."""
    version = _C.level_zero.modules_compiler().split()[-1]
    names = {name: f"{name}-{version}" for name in ("clang", "opt", "llvm-spirv")} | {"spirv-opt": "spirv-opt"}
    if missing := [name for name in names.values() if not shutil.which(name)]:
        pytest.skip(f"{' and '.join(missing)} not found, to compile modules again (clang-15, llvm-spirv-15 or newer, spirv-tools)")
    return {name.replace("-", "_"): path for name, path in names.items()}


def test_every_source_is_a_module() -> None:
    assert _C.level_zero.modules() == NAMES
    with pytest.raises(KeyError, match="there is none of the name 'nothing'"):
        _C.level_zero.module("nothing")


def test_modules_are_small(tool: ModuleType) -> None:
    assert sum(len(zlib.compress(tool.packed(_C.level_zero.module(name)))) for name in NAMES) < MOST_BYTES


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_a_module_is_what_its_source_gives(source: Path, tool: ModuleType, tmp_path: Path) -> None:
    """To the last bit, made again in another folder: so what the library unpacks is what the tool packed."""
    given = argparse.Namespace(source=source, output=tmp_path / "module", **clang_tools())
    module = _C.level_zero.module(source.name.removesuffix(".spirv.cpp"))
    assert tool.compiled(given, tmp_path) == module
    version = bytes([0, 2, 1, 0])  # 1.2: what old drivers read
    assert module[:4] == bytes.fromhex("03022307") and module[4:8] <= version
    depends = (tmp_path / "module.d").read_text()
    assert str(source) in depends and "level_zero/device/prelude.hpp" in depends and str(tmp_path / "array") not in depends


def barriers_of(module: bytes) -> list[int]:
    """The memory semantics of each OpControlBarrier, in the order of the module."""
    words, at, constants, found = memoryview(module).cast("I"), 5, {}, []
    while at < len(words):
        size, op = words[at] >> 16, words[at] & 0xFFFF
        if op == 43:  # OpConstant: type, result, value
            constants[words[at + 2]] = words[at + 3]
        elif op == 224:  # OpControlBarrier: execution, memory, semantics
            found.append(constants[words[at + 3]])
        at += size
    return found


def test_classes_of_blocks_are_ordered_in_global_memory() -> None:
    """One thread of a work-group zeroes there, another one writes: a barrier of local memory does not order that."""
    found = barriers_of(_C.level_zero.module("attention_prepare"))
    assert found and all(semantics & 0x200 for semantics in found), found  # CrossWorkgroupMemory


def test_a_build_without_the_tools_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "level_zero").mkdir()
    (tmp_path / "level_zero" / "modules.inc").touch()
    (tmp_path / "main.cpp").write_text("""
#include <cstdio>
#include "level_zero/runtime/modules.hpp"
using namespace lowbit::level_zero;
int main() {
  std::puts(module_names().empty() && module_words("pack").empty() && modules_compiler().empty() ? "none" : "some");
  std::puts(modules_missing().c_str());
}
""")
    sources = [tmp_path / "main.cpp", ROOT / "csrc" / "level_zero" / "runtime" / "modules.cpp"]
    command = ["g++", "-std=c++20", '-DLOWBIT_MODULES_BY=""', f"-I{tmp_path}", f"-I{ROOT / 'csrc'}", *sources, "-o", tmp_path / "program"]
    subprocess.run(command, check=True)
    said = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "none" and re.match("this build has no SPIR-V modules: install clang, .*apt install clang-15", said[1])
