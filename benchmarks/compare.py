# SPDX-License-Identifier: Apache-2.0
"""Print two result files of bench_linear.py side by side: the times of both, and how often the second is faster.

python benchmarks/compare.py before.json after.json
python benchmarks/compare.py results/linear_avx2.json results/linear_avx512.json --only w4a8
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from harness import describe, duration, table

NOISE = 0.15  # differences below are ties on a shared machine (notes/ggml-figures.md)
Key = tuple[int, int, int, int, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--only", default="", help="part of candidate names")
    args = parser.parse_args()
    first, second = (json.loads(path.read_text()) for path in (args.first, args.second))
    for label, head in (("first", first), ("second", second)):
        print(f"{label}: {describe(head)}\n")
    left, right = _cells(first), _cells(second)
    rows = []
    for key in [key for key in left if key in right and args.only.lower() in key[4].lower()]:
        a, b = left[key], right[key]
        speedup = a["best_s"] / b["best_s"]
        word = "faster" if speedup > 1 + NOISE else "SLOWER" if speedup < 1 / (1 + NOISE) else "tie"
        k, n, threads, m, name = key
        place = f"{k}x{n} M={m} {threads}t"
        rows.append(
            [
                name,
                place,
                duration(a["best_s"]),
                duration(b["best_s"]),
                f"{speedup:.2f}x",
                word,
                f"{a['ratio']:.2f} / {b['ratio']:.2f}",
            ]
        )
    print(table(["candidate", "KxN, M, threads", "first", "second", "second is", "", "x torch fp32"], rows))
    for label, only in (("first", left.keys() - right.keys()), ("second", right.keys() - left.keys())):
        if only:
            print(f"only in the {label}: {len(only)} cells")


def _cells(head: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    return {(row["k"], row["n"], row["threads"], row["m"], row["candidate"]): row for row in head["results"]}


if __name__ == "__main__":
    main()
