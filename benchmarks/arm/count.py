# SPDX-License-Identifier: Apache-2.0
"""Cycles of the inner loops of Arm's kernel rows by llvm-mca, which counts them from a processor's ports and latencies.

    python benchmarks/arm/count.py                               # ours, as benchmarks/arm/counts.json has them
    python benchmarks/arm/count.py --object FILE.o SYMBOL sdot   # the loop of that product in another library's object

Wants Debian's g++-12-aarch64-linux-gnu and llvm-19. All memory is in L1 and every branch is predicted: what a memory, a
cache or a branch predictor does is not counted. docs/measured/arm.md has the table.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILER, OBJDUMP, MCA = "aarch64-linux-gnu-g++-12", "aarch64-linux-gnu-objdump", "llvm-mca-19"
PROCESSORS = ("neoverse-n1", "neoverse-n2", "neoverse-v2", "apple-m1", "cortex-a76")
# The products of one instruction, each of a row by a column at one k.
PRODUCTS = {"sdot": 16, "smmla": 32, "bfmmla": 16, "fmla": 4}
# As csrc/cpu/CMakeLists.txt compiles kernels.
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fno-tree-ter", "-fno-tree-reassoc", "-fno-schedule-insns", "-fno-tree-pre"]
FLAGS += [
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-w",
    f"-I{ROOT / 'csrc'}",
]
ISAS = {
    "neon": "-march=armv8-a",
    "neon_dot": "-march=armv8.2-a+dotprod",
    "neon_i8mm": "-march=armv8.2-a+dotprod+i8mm",
    "neon_bf16": "-march=armv8.2-a+dotprod+bf16",
}


@dataclass(frozen=True)
class Loop:
    name: str
    isa: str
    symbol: str  # of the function, a pattern
    product: str
    also: tuple[tuple[str, int], ...] = ()  # other instructions of the loop, and of each the least number


# Conversions of sums to float: the loop around the products of a group, which scales them.
SCALES = ("scvtf", 1)
OURS = (
    Loop(
        "int4 x int8, one row, groups of 32, low nibbles",
        "neon_dot",
        "int4_int8_one_row",
        "sdot",
        (SCALES, ("and", 32)),
    ),
    Loop(
        "int4 x int8, one row, groups of 32, high nibbles",
        "neon_dot",
        "int4_int8_one_row",
        "sdot",
        (SCALES, ("ushr", 32)),
    ),
    Loop("int4 x int8, 6 rows, no groups", "neon_dot", "int4_int8_rows", "sdot"),
    Loop("int8, many rows", "neon_i8mm", "TileUnit::add_tiles", "smmla"),
    Loop("bfloat16, many rows", "neon_bf16", "TileUnit::add_tiles", "bfmmla"),
    Loop("float32, 6 rows", "neon", "float32_rows|float_tile", "fmla"),
)


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str

    @property
    def name(self) -> str:
        return self.text.split()[0]

    @property
    def target(self) -> int | None:
        """Where a branch inside the function goes."""
        found = re.fullmatch(r"(?:b|b\.\w+|cbn?z\s+\w+,|tbn?z\s+\w+, #\d+,)\s+([0-9a-f]+)", self.text)
        return int(found[1], 16) if found else None

    def assembly(self) -> str:
        return self.text if self.target is None else re.sub(r"[0-9a-f]+$", "loop", self.text)


def function(binary: Path, symbol: str) -> list[Instruction]:
    """The instructions of the one function whose demangled name the pattern is found in."""
    done = subprocess.run([OBJDUMP, "-dC", "--no-show-raw-insn", binary], capture_output=True, text=True, check=True)
    parts = re.split(r"\n(?=[0-9a-f]{16} <)", done.stdout)
    found = [i for i, part in enumerate(parts) if re.search(symbol, part.partition("\n")[0])]
    if not found:
        raise SystemExit(f"{binary}: no function has {symbol!r} in its name")
    end = found[0] + 1
    while end < len(parts) and re.match(r"\w+ <label_", parts[end]):  # of assembly
        end += 1
    lines = re.findall(r"^ +([0-9a-f]+):\t(.*)$", "\n".join(parts[found[0] : end]), re.MULTILINE)
    return [Instruction(int(at, 16), re.sub(r"\s+(//|<).*", "", text).replace("\t", " ")) for at, text in lines]


def turn(code: list[Instruction], first: int, last: int) -> list[Instruction]:
    """One turn of a loop, from `first` to the branch at `last`, where no other branch is taken; none if it leads elsewhere."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    steps, i = [], index[first]
    while i < len(code) and len(steps) < len(code):
        step = code[i]
        steps.append(step)
        if step.address == last:
            return steps
        i = index[step.target] if step.name == "b" and step.target in index else i + 1
    return []


def innermost(code: list[Instruction], loop: Loop) -> list[Instruction]:
    """The shortest loop with the product, and what else it must have."""
    closing = [step for step in code if step.target is not None and step.target <= step.address and step.name != "b"]
    turns = [turn(code, step.target, step.address) for step in closing if step.target is not None]
    for steps in sorted(turns, key=len):
        counts = Counter(step.name for step in steps)
        if all(counts[name] >= least for name, least in ((loop.product, 1), *loop.also)):
            return steps
    raise SystemExit(f"{loop.symbol}: no loop with {loop.product} and {loop.also}")


def cycles(steps: list[Instruction], processor: str) -> float:
    text = "loop:\n" + "\n".join(step.assembly() for step in steps) + "\n"
    command = [MCA, "-mtriple=aarch64", f"-mcpu={processor}", "-mattr=+dotprod,+i8mm,+bf16", "-iterations=200", "-json"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{MCA}: {done.stderr}")
    summary = json.loads(done.stdout)["CodeRegions"][0]["SummaryView"]
    return summary["TotalCycles"] / summary["Iterations"]


def count(loop: Loop, binary: Path) -> dict[str, object]:
    steps = innermost(function(binary, loop.symbol), loop)
    products = sum(step.name == loop.product for step in steps)
    return {
        "loop": loop.name,
        "isa": loop.isa,
        "instructions": len(steps),
        loop.product: products,
        "products": products * PRODUCTS[loop.product],
        "cycles": {processor: round(cycles(steps, processor), 1) for processor in PROCESSORS},
    }


def compiled(isa: str, folder: Path) -> Path:
    target = folder / f"{isa}.o"
    header = [f"-DLOWBIT_ISA_NAME={isa}", f'-DLOWBIT_ISA_HEADER="cpu/simd/{isa}.hpp"', f"-DLOWBIT_LOOPS_OF_{isa}"]
    source = ROOT / "benchmarks/arm/loops.cpp"
    subprocess.run([COMPILER, *FLAGS, ISAS[isa], *header, "-c", source, "-o", target], check=True)
    return target


def ours() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        objects = {isa: compiled(isa, Path(folder)) for isa in dict.fromkeys(loop.isa for loop in OURS)}
        return [count(loop, objects[loop.isa]) for loop in OURS]


def of_object(file: str, symbol: str, product: str, scaled: bool) -> dict[str, object]:
    return count(Loop(symbol, "", symbol, product, (SCALES,) * scaled), Path(file))


def missing() -> str:
    """Why this machine cannot count, or ''."""
    names = [name for name in (COMPILER, OBJDUMP, MCA) if shutil.which(name) is None]
    return f"no {', '.join(names)} on this machine: tools/test_env --only arm" if names else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--object", nargs=3, metavar=("FILE", "SYMBOL", "PRODUCT"))
    parser.add_argument("--scaled", action="store_true", help="the loop around the products, which scales their sums")
    arguments = parser.parse_args()
    if missing():
        sys.exit(missing())
    loops = ours() if arguments.object is None else [of_object(*arguments.object, arguments.scaled)]
    for loop in loops:
        print(json.dumps(loop))


if __name__ == "__main__":
    main()
