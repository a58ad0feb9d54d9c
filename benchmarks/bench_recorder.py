# SPDX-License-Identifier: Apache-2.0
"""The cost of the flight recorder and of a profile for a call of an op.

    python benchmarks/bench_recorder.py

The op is all_finite of one float, called from C++ (recorder_calls.cpp, compiled here with g++): 200 rounds in one
process take turns with the recorder off, on, and off inside of a profile, 20000 calls each. The best round of each
counts, and the cost is the difference to the first.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from harness import describe, header, table

from lowbit import _C

HERE = Path(__file__).parent


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    library = Path(_C.__file__).with_name("liblowbit.so")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "recorder_calls"
        flags = ["-std=c++20", "-O2", "-w", f"-I{HERE.parent / 'csrc'}", f"-Wl,-rpath,{library.parent}", "-pthread"]
        subprocess.run(["g++", *flags, HERE / "recorder_calls.cpp", library, "-o", program], check=True)
        said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    off, *others = map(float, said.split())
    print(describe(header()))
    names = ("recorder on", "recorder off, in a profile")
    lines = [["recorder off", f"{off:.1f}", ""]]
    lines += [[name, f"{took:.1f}", f"{took - off:.1f}"] for name, took in zip(names, others, strict=True)]
    print(table(["", "ns a call", "more than off"], lines))


if __name__ == "__main__":
    main()
