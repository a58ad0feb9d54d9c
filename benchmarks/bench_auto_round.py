# SPDX-License-Identifier: Apache-2.0
"""int4 in groups of 32 as AutoRound's files have it, 4096 x 4096, float32: lowbit and auto-round-lib, AutoRound's backend.

    pip install --no-deps auto-round-lib==0.16.0 && python benchmarks/bench_auto_round.py

Both have the same codes and scales; the error of each beside a float32 product is printed before its times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from harness import Run, table
from torch import Tensor, nn

import lowbit

SIZE, GROUP = 4096, 32
ROWS = (1, 4, 32, 256)
CONFIGS = {
    "lowbit, float activations": lowbit.int4_weight_only(group_size=GROUP),
    "lowbit, int8 activations": lowbit.int8_dynamic_activation_int4_weight(group_size=GROUP),
}


def candidates() -> tuple[dict[str, Callable[[Tensor], Tensor]], Tensor]:
    """Return the products by name, and the weight ``[k, n]``."""
    import auto_round_kernel

    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (SIZE, SIZE), dtype=torch.int8)
    scale = (torch.rand(SIZE // GROUP, SIZE) * 0.01 + 0.01).half().float()
    weight = (codes.float().view(-1, GROUP, SIZE) * scale[:, None]).view(SIZE, SIZE)
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, config in CONFIGS.items():
        model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))
        model[0].weight.data = weight.t().contiguous()
        lowbit.quantize_(model, config, head=None)
        found[name] = model.eval()
    none = torch.zeros(SIZE // GROUP, SIZE, dtype=torch.int8)
    for compute in ("fp32", "int8"):
        shape = (GROUP, compute, "int4", "fp32", False)
        blob = auto_round_kernel.repack_quantized_weight(codes, scale, none, *shape)
        found[f"auto-round-lib, {compute}"] = lambda x, blob=blob, shape=shape: auto_round_kernel.woqgemm(
            x, blob, torch.empty(0), SIZE, SIZE, *shape
        )
    return found, weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    products, weight = candidates()
    rows = []
    with torch.inference_mode():
        x = torch.randn(4, SIZE)
        wanted = x @ weight
        for name, product in products.items():
            print(f"{name}: error {((product(x) - wanted).norm() / wanted.norm()).item():.1e}")
        run = Run()
        for m in ROWS:
            x, best = torch.randn(m, SIZE), dict.fromkeys(products, 1e9)
            for _ in range(options.rounds):
                for name, product in products.items():
                    for _ in range(2 if m >= 32 else 8):
                        begin = time.perf_counter()
                        product(x)
                        best[name] = min(best[name], time.perf_counter() - begin)
            rows.append([str(m), *(f"{1e3 * seconds:.2f}" for seconds in best.values())])
    print(table(("rows, ms", *products), rows))
    run.end(None, rows)


if __name__ == "__main__":
    main()
