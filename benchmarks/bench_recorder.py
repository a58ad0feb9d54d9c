# SPDX-License-Identifier: Apache-2.0
"""The cost of the flight recorder and of a profile for a call of an op, and of the recorder for a call of a layer
and a collective.

    python benchmarks/bench_recorder.py

The op is all_finite of one float, called from C++ (recorder_calls.cpp, compiled here with g++): 200 rounds in one
process take turns with the recorder off, on, and off inside of a profile, 20000 calls each. The layer is an int4 linear
layer of 64 x 64 for one token, called from Python: 1000 rounds, recorder off and on in turns, 200 calls each. The
collective is an all_reduce of one float by gloo in a group of one rank: 60 rounds of 100 before record_collectives()
and 60 after it. The best round of each counts, and the cost is the difference to off.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from harness import describe, header, table

import lowbit
from lowbit import _C

HERE = Path(__file__).parent
LIBRARY = Path(_C.__file__).with_name("liblowbit.so")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        off, on, profiled = op(folder)
        layer_off, layer_on = layer(folder)
        collective_off, collective_on = collective(folder)
    print(describe(header()))
    lines = [
        ["the op, recorder off", f"{off:.1f}", ""],
        ["the op, recorder on", f"{on:.1f}", f"{on - off:.1f}"],
        ["the op, recorder off, in a profile", f"{profiled:.1f}", f"{profiled - off:.1f}"],
        ["the layer, recorder off", f"{layer_off:.0f}", ""],
        ["the layer, recorder on", f"{layer_on:.0f}", f"{layer_on - layer_off:.0f}"],
        ["the collective, recorder off", f"{collective_off:.0f}", ""],
        ["the collective, recorder on", f"{collective_on:.0f}", f"{collective_on - collective_off:.0f}"],
    ]
    print(table(["", "ns a call", "more than off"], lines))


def op(folder: str) -> list[float]:
    """Nanoseconds with the recorder off, on, and off in a profile."""
    program = Path(folder) / "recorder_calls"
    flags = ["-std=c++20", "-O2", "-w", f"-I{HERE.parent / 'csrc'}", f"-Wl,-rpath,{LIBRARY.parent}", "-pthread"]
    subprocess.run(["g++", *flags, HERE / "recorder_calls.cpp", LIBRARY, "-o", program], check=True)
    environment = os.environ | {"LOWBIT_RECORD": "1", "LOWBIT_RECORD_DIR": folder}
    said = subprocess.run([program], env=environment, check=True, capture_output=True, text=True).stdout
    return [float(word) for word in said.split()]


@torch.inference_mode()
def layer(folder: str) -> list[float]:
    """Nanoseconds with the recorder off, and on, which is the same switch that the library reads."""
    module, x = torch.nn.Linear(64, 64, bias=False), torch.ones(1, 64)
    lowbit.quantize_(module, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    lowbit.recorder.start(folder=folder)
    wants = ctypes.c_int.in_dll(ctypes.CDLL(str(LIBRARY)), "_ZN6lowbit8recorder5wantsE")
    best = [float("inf"), float("inf")]
    for _ in range(1000):
        for is_on in (0, 1):
            wants.value = is_on
            begin = time.perf_counter_ns()
            for _ in range(200):
                module(x)
            best[is_on] = min(best[is_on], (time.perf_counter_ns() - begin) / 200)
    assert len(lowbit.recorder.records()) == 2048
    return best


def collective(folder: str) -> list[float]:
    """Nanoseconds before torch.distributed's ops are recorded, and after."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    best, x = [], torch.ones(1)
    for is_on in (False, True):
        if is_on:
            lowbit.recorder.record_collectives()
        best.append(float("inf"))
        for _ in range(60):
            begin = time.perf_counter_ns()
            for _ in range(100):
                torch.distributed.all_reduce(x)
            best[-1] = min(best[-1], (time.perf_counter_ns() - begin) / 100)
    assert lowbit.recorder.records()[-1].op == "c10d.all_reduce"
    torch.distributed.destroy_process_group()
    return best


if __name__ == "__main__":
    main()
