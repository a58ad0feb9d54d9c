# SPDX-License-Identifier: Apache-2.0
"""The ops of bitsandbytes that lowbit takes over, ours against bitsandbytes' own CPU kernels in the same rounds.

    python benchmarks/bench_bitsandbytes.py
    python benchmarks/bench_bitsandbytes.py --numel 16777216 --rounds 20

Prints the best time of each in milliseconds and their ratio; both are called through torch's dispatcher.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ["LOWBIT_BITSANDBYTES"] = "0"  # its own kernels are fetched before ours take their place

import bitsandbytes  # noqa: E402
import torch  # noqa: E402
from bitsandbytes.functional import create_dynamic_map  # noqa: E402

from lowbit.integrations.bitsandbytes_ops import OPS, states, take_ops  # noqa: E402

KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def update_8bit(name: str, numel: int, dtype: torch.dtype) -> tuple[object, ...]:
    """Arguments of one step; a second state only where the rule has one."""
    two = name in ("adam", "lamb", "ademamix")
    p, g = torch.randn(numel).to(dtype), torch.randn(numel).to(dtype)
    state1 = torch.full((numel,), 127, dtype=torch.uint8)
    state2 = torch.zeros(numel, dtype=torch.uint8) if two else None
    absmax = torch.zeros(-(-numel // 256))
    maps = create_dynamic_map(True), create_dynamic_map(False) if two else None
    return (
        name, g, p, state1, state2, 0.9, 0.999, 0.0, 0.0, 1e-8, 3, 1e-3, maps[0], maps[1], absmax,
        absmax.clone() if two else None, 0.01, 1.0, False,
    )  # fmt: skip


def cases(numel: int) -> dict[str, tuple[str, tuple[object, ...]]]:
    """Each case: the op and its arguments."""
    result = {
        f"{name} 8-bit step, {str(dtype).removeprefix('torch.')}": (
            "optimizer_update_8bit_blockwise",
            update_8bit(name, numel, dtype),
        )
        for name in ("adam", "lion", "momentum")
        for dtype in (torch.float32, torch.bfloat16)
    }
    x, signed = torch.randn(numel), create_dynamic_map(True)
    result["quantize_blockwise"] = "quantize_blockwise", (x, signed, 256)
    return result


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    theirs = {op.__name__: torch.library.get_kernel(f"bitsandbytes::{op.__name__}", "CPU") for op in OPS}
    take_ops()
    versions = f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}"
    print(f"{versions}, {torch.get_num_threads()} threads; {options.numel} elements")
    print(f"{'':34}{'theirs ms':>12}{'ours ms':>12}{'ratio':>8}")
    for title, (op, arguments) in cases(options.numel).items():
        assert states[op] == "ours", states[op]
        ours = getattr(torch.ops.bitsandbytes, op).default
        best = [float("inf")] * 2
        for _ in range(options.rounds):
            best[0] = min(best[0], seconds(lambda: theirs[op].call_boxed(KEYS, *arguments)))  # noqa: B023
            best[1] = min(best[1], seconds(lambda: ours(*arguments)))  # noqa: B023
        print(f"{title:34}{1e3 * best[0]:12.2f}{1e3 * best[1]:12.2f}{best[0] / best[1]:7.1f}x")


if __name__ == "__main__":
    main()
