# SPDX-License-Identifier: Apache-2.0
"""The time that lowbit's entry point adds to `import torch`, and that of making the list of backends.

    python benchmarks/bench_import.py [--rounds 10] [--out file.json]

Each sample is a fresh process, which imports torch with LOWBIT_AUTOLOAD=0 and then runs the entry point as torch does:
the difference of two whole imports (2.2 s each) is lost in their spread of 0.1 s. CPU time, since on a machine with
other work a wall clock says little. The least and the median of each. The entry point must stay below 30 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

CLOCK = "start = time.process_time(); {}; print(time.process_time() - start)"
CASES = {
    "what lowbit adds to import torch": "import time, os, torch, lowbit_autoload; os.environ.pop('LOWBIT_AUTOLOAD'); "
    + CLOCK.format("lowbit_autoload.autoload()"),
    "the list of backends, when first needed": "import time, torch, lowbit; "
    + CLOCK.format("lowbit._C.kernels('linear')"),
}


def milliseconds(code: str) -> float:
    """CPU time that the code says it took, in a process of its own."""
    environment = os.environ | {"LOWBIT_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, code in CASES.items():
            samples[name].append(milliseconds(code))
    for name, values in samples.items():
        print(f"{name:40} {min(values):6.1f} ms, median {statistics.median(values):.1f} ms of {len(values)}")
    if options.out:
        options.out.write_text(json.dumps({"milliseconds": samples}, indent=1))


if __name__ == "__main__":
    main()
