# SPDX-License-Identifier: Apache-2.0
"""Every function of csrc/cpu/simd/ on each instruction set of csrc/cpu/CMakeLists.txt against plain C++.

tests/cpp/simd/simd.cpp prints what it checks, and that must be what the headers have.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import kept
import pytest

from lowbit import _C, testing

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
SIMD = CSRC / "cpu/simd"

BUILD = (CSRC / "cpu/CMakeLists.txt").read_text()
ISAS = re.findall(r"^ *lowbit_cpu_isa\((\w+) ", BUILD, re.MULTILINE)
# Headers that stand in for those of instruction sets which few machines have, and the instruction set whose flags they
# are compiled with: these products by the same instructions of AVX-512, the tile unit of amx in plain C++.
STAND_INS = {"avx2_vnni": ("avx2_vnni_by_avx512", "avx512_vnni"), "amx": ("emulated_amx", "scalar")}
# Where qemu emulates them, as tools/arm does: a processor that has the instruction set, and not the next better one. qemu 7.2
# has only one with smmla and bfmmla.
ARM_PROCESSORS = {"neon": "cortex-a53", "neon_dot": "neoverse-n1", "neon_i8mm": "max", "neon_bf16": "max"}
# What some instruction sets have, and a name of it, for the program's checks of it.
PARTS = {"TILES": "TileUnit::zero", "BF16_PAIRS": "bf16_pairs", "LOOKUP32_U16": "lookup32_u16"}


def flags_of(isa: str) -> list[str]:
    """The flags of the build that say which instructions there are."""
    sets = dict(re.findall(r"^ *set\((avx\w+) (.*)\)$", BUILD, re.MULTILINE))
    [line] = re.findall(rf"^ *lowbit_cpu_isa\({isa} [^)]*?FLAGS ([^)]*)\)", BUILD, re.MULTILINE)
    while "${avx" in line:
        line = re.sub(r"\$\{(avx\w+)\}", lambda match: sets[match[1]], line)
    return [flag for flag in line.split() if flag.startswith("-m")]


def skip_without(isa: str) -> None:
    rows = [row for op in _C.OPS for row in testing.rows(op) if row["backend"] == isa]
    if not rows or not rows[0]["available"]:
        pytest.skip(str(rows[0]["reason"]) if rows else "not compiled")


def printed_by(isa: str, header: str, instructions: str, compiler: str | None = None, by: tuple[str, ...] = ()) -> list[str]:
    """The lines of the program, compiled with `header` for `isa` and with the instructions of another; run `by` an emulator."""
    compiler = compiler or shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: the emulation is C++ and is compiled by this test")
    # As the library, but for speed of compilation.
    flags = ["-std=c++20", "-O0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w"]
    flags += [f"-I{CSRC}", f"-DLOWBIT_ISA_NAME={isa}", f'-DLOWBIT_ISA_HEADER="{header}"', "-Dalways_inline=unused"]
    names = {name.partition(" ")[0] for name in vocabulary(isa)}
    flags += flags_of(instructions) + [f"-DLOWBIT_HAS_{what}" for what, name in PARTS.items() if name in names]

    def compile(folder: Path) -> None:
        subprocess.run([compiler, *flags, *["-static"] * bool(by), HERE / "simd/simd.cpp", "-o", folder / "simd"], check=True)

    sources = [*SIMD.glob("*.hpp"), *HERE.glob("simd/*"), *HERE.glob("*.hpp"), *CSRC.glob("core/*.hpp")]
    sources += [CSRC / "cpu/loops.hpp", CSRC / "cpu/vector_io.hpp"]
    program = kept.folder(f"simd-{isa}-{Path(header).stem}", sources, flags, compiler, make=compile) / "simd"
    done = subprocess.run([*by, program], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: " + "\n".join(
        [line for line in done.stdout.splitlines() if line.startswith("FAILED")] or done.stdout.splitlines()[-1:]
    )
    return done.stdout.splitlines()


def included(header: Path) -> list[Path]:
    inner = re.findall(r'#include "cpu/simd/(\w+\.hpp)"', header.read_text())
    return [*(file for name in inner for file in included(SIMD / name)), header]


FUNCTION = re.compile(
    r"^ *(?:template <[^\n]*?>\s+)?(?:LOWBIT_INLINE|constexpr) (?:static |constexpr )*"
    r"([\w:]+)\s+(\w+)\(([^;{]*?)\) (?:const )?\{",
    re.MULTILINE,
)
CLASS = re.compile(r"^(?:struct|class) (\w+)(?: : (?:public )?(\w+))? \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)


REGISTER = re.compile(r"__m|\dx\d+(x\d)?_t")  # of x86, of Arm


def functions(text: str) -> set[tuple[str, str, str]]:
    """(result, name, types of the parameters) of those that are not over registers, which others are made of."""
    found = set()
    for result, name, parameters in FUNCTION.findall(text):
        types = [re.sub(r"(?<=[\w&*]) \w+$", "", parameter.strip()) for parameter in parameters.split(", ")]
        if not REGISTER.search(result + " ".join(types)):
            found.add((result, name, ", ".join(types)))
    return found


def vocabulary(isa: str) -> set[str]:
    """The names that simd.cpp has to check: functions with their types, and public functions of classes."""
    headers = dict.fromkeys(
        [*included(SIMD / f"{isa}.hpp"), SIMD / "math.hpp", SIMD / "double.hpp", CSRC / "cpu/vector_io.hpp"]
    )
    text = "\n".join(re.sub(r" *//.*", "", header.read_text()) for header in headers)
    text = re.sub(r"\n#define .*(?:\\\n.*)*", "", text)
    members = {
        f"{name}::{function}"
        for name, _, body in CLASS.findall(text)
        for _, function, _ in functions(body.partition(" private:")[0])
        if function != name
    }
    return members | {f"{name} {result}({types})" for result, name, types in functions(CLASS.sub("", text))}


def checked(isa: str, printed: list[str]) -> set[str]:
    """The names that the program says, and functions that a class has from another one as those of the other, too."""
    told = {re.sub(r"<.*?>", "", line) for line in printed}
    texts = [header.read_text() for header in included(SIMD / f"{isa}.hpp")]
    derived = [(name, base) for text in texts for name, base, _ in CLASS.findall(text) if base]
    return told | {line.replace(f"{name}::", f"{base}::") for line in told for name, base in derived}


def digests(printed: list[str]) -> set[str]:
    return {line.partition(",")[0] for line in printed if line.startswith("digest ")}


@pytest.mark.core
@pytest.mark.parametrize("isa", ISAS)
def test_functions_of_an_instruction_set_are_those_of_plain_c(isa: str) -> None:
    skip_without(isa)
    printed = printed_by(isa, f"cpu/simd/{isa}.hpp", isa)
    assert vocabulary(isa) - checked(isa, printed) == set()
    scalar = printed_by("scalar", "cpu/simd/scalar.hpp", "scalar")
    assert len(digests(scalar)) == 9 and digests(printed) == digests(scalar)  # math.hpp: the same bits everywhere


@pytest.mark.core
@pytest.mark.parametrize("isa", ARM_PROCESSORS)
def test_functions_of_an_arm_set_are_those_of_plain_c_under_qemu(isa: str) -> None:
    """The same program by the cross compiler; scalar's digests are of this machine, so both give the same bits."""
    compiler, qemu = shutil.which("aarch64-linux-gnu-g++-12"), shutil.which("qemu-aarch64-static")
    if compiler is None or qemu is None:
        pytest.skip("no aarch64-linux-gnu-g++-12 or no qemu-aarch64-static on this machine: tools/test_env")
    printed = printed_by(isa, f"cpu/simd/{isa}.hpp", isa, compiler, (qemu, "-cpu", ARM_PROCESSORS[isa]))
    assert vocabulary(isa) - checked(isa, printed) == set()
    scalar = printed_by("scalar", "cpu/simd/scalar.hpp", "scalar")
    assert len(digests(scalar)) == 9 and digests(printed) == digests(scalar)


@pytest.mark.core
@pytest.mark.parametrize("isa", STAND_INS)
def test_functions_of_what_stands_in_are_those_of_plain_c(isa: str) -> None:
    header, instructions = STAND_INS[isa]
    skip_without(instructions)
    printed = printed_by(isa, f"../tests/cpp/{header}.hpp", instructions)
    missing = vocabulary(isa) - checked(isa, printed)
    assert {name.partition(" ")[0] for name in missing} <= {"transpose_8x8"}  # a part of others, in AVX2 and AVX-512


def test_the_vocabulary_is_read_from_the_headers() -> None:
    for isa in ISAS:
        found = vocabulary(isa)
        assert len(found) > 100
        assert {"add f32x16(f32x16, f32x16)", "sum float(f32x16)", "store_f16 void(uint16_t*, f32x16)"} <= found
        assert {"shift_left i32x16(i32x16)", "int4_shift int(int)", "Dot4::step", "Dot8::codes"} <= found
        assert ("TileUnit::store" in found) == (isa in ("amx", "avx512_bf16", "neon_bf16", "neon_i8mm"))
