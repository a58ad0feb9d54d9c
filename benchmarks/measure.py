# SPDX-License-Identifier: Apache-2.0
"""Measure the tables of README and of docs/ops, and write each into its page, with machine, commit and date.

    python benchmarks/measure.py --readme --docs                 # all; some minutes a table
    python benchmarks/measure.py --readme --docs --only linear   # one of them
    python benchmarks/measure.py --docs --quick                  # few rounds, nothing is written: does it work here?

README's picture is drawn of the same figures. A page has its table between the comments `<!-- measured: NAME -->` and
`<!-- /measured -->`. A table is made from the result files of a benchmark, one for each instruction set of the machine
that has columns: AVX2, to which a better processor is held by environment variables, and the best one. Result files are
kept in benchmarks/results, and a run that was ended goes on behind them; --again measures anew, as a new commit of what
is measured does. Figures of a run beside which other processes took more than a twentieth of the CPU time are not
written, except with --loaded. llama.cpp takes part when it is built: --ggml llama.cpp=/path/libggml.so
(docs/measured/linear.md says how).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import picture
import tables
import torch
from harness import commit

from lowbit import _C

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IDLE = 0.05  # share of the CPU time that other processes may take
NAMES = {
    "avx2_vnni": "AVX-VNNI",
    "avx512": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx": "AMX",
}
SDPA = ",".join("x".join(map(str, shape)) for shape in tables.SDPA_SHAPES)
HELD = "LOWBIT_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2"
NOT_HELD = "torch dynamic"  # its FBGEMM takes VNNI whatever the environment says; llama.cpp is as it was built
MEMBERS = "w4a8 g32,w8a8,int8 weight-only,int4 weight-only,dense bf16,torch dynamic,int4pack,torchao int8,llama.cpp"
LINEAR = ["--shapes", "4096x4096", "--m", ",".join(map(str, tables.M)), "--threads", str(torch.get_num_threads())]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A call of a benchmark, and the tables that are made from its result files.

    Args:
        script: its file.
        arguments: without --quick, --ggml and --out.
        tables: by page and name.
        takes_ggml: whether llama.cpp takes part.
    """

    script: str
    arguments: list[str]
    tables: dict[tuple[str, str], Callable[[tables.Runs], str]]
    takes_ggml: bool = False


BENCHMARKS = {
    "linear": Benchmark(
        "bench_linear.py",
        [*LINEAR, "--no-overhead", "--only", MEMBERS],
        {("README.md", "linear"): tables.readme_linear, ("docs/ops/linear.md", "linear"): tables.docs_linear},
        takes_ggml=True,
    ),
    "attention": Benchmark(
        "bench_attention.py",
        ["--parts", "sdpa", "--dtypes", "float32,bfloat16", "--sdpa-shapes", SDPA],
        {("docs/ops/attention.md", "attention"): tables.attention},
    ),
    "flex": Benchmark(
        "bench_attention.py",
        ["--parts", "flex", "--dtypes", "float32"],
        {("docs/ops/flex_attention.md", "flex"): tables.flex},
    ),
    "decode": Benchmark(
        "bench_attention.py",
        ["--parts", "decode", "--decode-lengths", "16384"],
        {("docs/ops/decode.md", "decode"): tables.decode},
        takes_ggml=True,
    ),
    "optim": Benchmark(
        "bench_optim.py",
        ["--problems", "float32,bfloat16", "--no-peers"],
        {("docs/ops/optim.md", "optim"): tables.optim},
    ),
}  # fmt: skip


def main() -> None:
    args = parse_arguments()
    for name in args.only:
        benchmark = BENCHMARKS[name]
        wanted = {place: make for place, make in benchmark.tables.items() if args.pages(place[0])}
        if not wanted:
            continue
        start = time.monotonic()
        runs = {isa: measure(args, name, benchmark, isa, environment) for isa, environment in levels().items()}
        print(f"{name}: {time.monotonic() - start:.0f} s")
        others = max(head["foreign_cpu_share"] or 0 for head in runs.values())
        for (page, mark), make in wanted.items():
            text = f"{tables.source(runs)}\n\n{make(runs)}"
            if args.quick:
                print(f"\n{page}, not written (--quick):\n\n{text}\n")
            elif others > IDLE and not args.loaded:
                print(f"{page}: not written, other processes took {100 * others:.0f} % of the CPU time (--loaded)")
            else:
                write(ROOT / page, mark, text)
                print(f"{page}: written")
                if (page, mark) == ("README.md", "linear"):
                    picture.draw(runs, ROOT / "docs" / "pictures" / "linear_speed.png")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true", help="README.md")
    parser.add_argument("--docs", action="store_true", help="docs/ops")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help=f"of {', '.join(BENCHMARKS)} (default all)")
    parser.add_argument("--ggml", action="append", default=[], help="NAME=PATH of libggml.so")
    parser.add_argument("--again", action="store_true", help="do not take result files of an earlier run")
    parser.add_argument("--loaded", action="store_true", help="write figures of a machine with other work too")
    parser.add_argument("--quick", action="store_true", help="few rounds; prints the tables and writes none")
    args = parser.parse_args()
    args.only = args.only.split(",")
    if unknown := [name for name in args.only if name not in BENCHMARKS]:
        parser.error(f"--only: must be of {', '.join(BENCHMARKS)}, got {', '.join(unknown)}")
    if not (args.readme or args.docs):
        parser.error("one of --readme and --docs must be given")
    args.pages = lambda page: args.readme if page == "README.md" else args.docs
    return args


def levels() -> dict[str, dict[str, str]]:
    """The instruction sets that have columns, with the environment that holds a process to each."""
    best = _C.isa()["detected"]
    held = dict(word.split("=") for word in HELD.split())
    return {"AVX2": {}} if best == "avx2" else {"AVX2": held, NAMES.get(best, best): {}}


def measure(args: argparse.Namespace, name: str, benchmark: Benchmark, isa: str, environment: dict[str, str]) -> dict:
    """The result file of a benchmark, run if there is none of this commit."""
    out = RESULTS / f"{name}-{isa.lower().replace(' ', '_')}{'-quick' if args.quick else ''}.json"
    if out.exists() and not args.again:
        head = json.loads(out.read_text())
        if head["commit"] == commit():
            print(f"{name}, {isa}: as measured {head['date']}")
            return head
    arguments = [word.replace(f",{NOT_HELD}", "") if environment else word for word in benchmark.arguments]
    command = [sys.executable, str(ROOT / "benchmarks" / benchmark.script), *arguments, "--out", str(out)]
    command += ["--quick"] if args.quick else []
    for library in args.ggml if benchmark.takes_ggml and not environment else []:
        command += ["--ggml", library]
    subprocess.run(command, env=os.environ | environment, check=True)
    return json.loads(out.read_text())


def write(page: Path, mark: str, text: str) -> None:
    """Put ``text`` between the marks of a page.

    Raises:
        ValueError: the page has no such marks.
    """
    begin, end = f"<!-- measured: {mark} -->", "<!-- /measured -->"
    before = page.read_text()
    after, count = re.subn(f"{begin}\n.*?\n{end}", lambda _: f"{begin}\n\n{text}\n\n{end}", before, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{page}: must have one table between {begin} and {end}, has {count}")
    page.write_text(after)


if __name__ == "__main__":
    main()
