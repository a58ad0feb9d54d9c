# SPDX-License-Identifier: Apache-2.0
"""The built library: an instruction that an old CPU lacks may only be reached after the CPU was asked.

In 64-bit code an instruction that starts with byte 62 is EVEX (AVX-512), c4 or c5 is VEX (AVX, AVX2, FMA, F16C). Weak symbols are
as bad: the linker keeps one copy of an inline function, and that may be the one compiled for AVX-512. (Those of the scalar rows are
not: what they are compiled for, the whole library is.)
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lowbit import _C

ROOT = Path(__file__).parents[2]
LIBRARIES = sorted({*Path(_C.__file__).parent.glob("liblowbit*.so*"), Path(_C.__file__)})
X86 = b"\x3e\x00"  # the processor in the header of an object file; tools/arm and tools/windows compile for others into build/ too
OBJECTS = sorted(
    path for path in ROOT.glob("build/*/csrc/**/*.o") if "sanitize" not in str(path) and path.open("rb").read(20)[18:] == X86
)
ISA_OF_OBJECT = re.compile(r"lowbit_cpu_(\w+)\.dir")
PREFIXES = {"scalar": set(), "avx2": {"c4", "c5"}, "avx2_vnni": {"c4", "c5"}, "avx512": {"c4", "c5", "62"}, "avx512_vnni": {"c4", "c5", "62"}, "avx512_bf16": {"c4", "c5", "62"}, "amx": {"c4", "c5", "62"}}
INSTRUCTION = re.compile(r"^\s+[0-9a-f]+:\t(62|c4|c5) [0-9a-f ]*\t\S", re.MULTILINE)  # a long one goes on in lines of bytes only
pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 code")
NO_OBJECTS = "no object files in build/: lowbit was installed from a wheel"


def tool(name: str, *arguments: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed (binutils)")
    return subprocess.run([name, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout


def isa_in(function: str) -> str | None:
    """The instruction set in whose namespace a function is; a lambda with a generic one inside has no demangled name."""
    return next((isa for isa in PREFIXES if f"lowbit::cpu::{isa}::" in function or f"3cpu{len(isa)}{isa}" in function), None)


def isa_of(path: Path) -> str:
    match = ISA_OF_OBJECT.search(str(path))
    return match[1] if match else "scalar"


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_no_avx_instruction_outside_its_namespace(library: Path) -> None:
    if "lowbit::" not in tool("nm", "-C", str(library)) and library.name.startswith("liblowbit"):
        pytest.skip(f"{library.name} is stripped: its objects are checked instead")
    for function in re.split(r"\n(?=[0-9a-f]{16} <)", tool("objdump", "-d", "-C", str(library))):
        prefixes = set(INSTRUCTION.findall(function))
        if not prefixes:
            continue
        name = function.partition("\n")[0]
        isa = isa_in(name)
        allowed = PREFIXES[isa] if isa else set()
        assert prefixes <= allowed, f"{library.name}: {name} holds instructions with prefix {sorted(prefixes - allowed)}"


@pytest.mark.skipif(not OBJECTS, reason=NO_OBJECTS)
def test_object_files_hold_only_instructions_of_their_isa() -> None:
    for path in OBJECTS:
        prefixes = set(INSTRUCTION.findall(tool("objdump", "-d", str(path))))
        allowed = PREFIXES[isa_of(path)]
        assert prefixes <= allowed, f"{path.name} of {isa_of(path)} holds instructions with prefix {sorted(prefixes - allowed)}"


@pytest.mark.skipif(not OBJECTS, reason=NO_OBJECTS)
def test_isa_objects_define_no_weak_symbol_and_no_static_initializer() -> None:
    isa_objects = [path for path in OBJECTS if ISA_OF_OBJECT.search(str(path))]
    assert isa_objects
    for path in isa_objects:
        for line in tool("nm", "-C", "--defined-only", str(path)).splitlines():
            kind, name = line[17:18], line[19:]
            weak = kind in "WVu" and not name.startswith("DW.ref.")
            assert not weak or isa_of(path) == "scalar", f"{path.name} of {isa_of(path)}: weak symbol {name}"
            if kind in "TBD":
                assert name.startswith(f"lowbit::cpu::{isa_of(path)}::"), f"{path.name}: {name} is visible to other objects"
        assert ".init_array" not in tool("objdump", "-h", str(path)), f"{path.name}: static initializer compiled for {isa_of(path)}"


def test_no_call_on_the_cpu_makes_a_functions_static() -> None:
    """A child that is forked while a thread makes one waits for that thread for ever. (A thread's own, TLS, is no such thing.)"""
    library = next(path for path in LIBRARIES if path.name.startswith("liblowbit"))
    symbols = tool("readelf", "-sW", str(library))
    if "_ZN6lowbit" not in symbols.partition(".symtab")[2]:
        pytest.skip(f"{library.name} is stripped: fuzz/corpus/fork_during_the_first_call.py forks instead")
    guards = re.findall(r"OBJECT .* _ZGVZ?N6lowbit(\w+)", symbols)
    elsewhere = re.compile(r"3sim|10level_zero|5torch12register_key")  # devices that a child has no use for; the GIL is held
    assert not [name for name in guards if not elsewhere.match(name)]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_library_needs_neither_torch_nor_openmp(library: Path) -> None:
    needed = re.findall(r"NEEDED\s+(\S+)", tool("objdump", "-p", str(library)))
    assert not [name for name in needed if re.search("torch|c10|gomp|iomp|omp", name)], needed
