# SPDX-License-Identifier: Apache-2.0
"""Attention with your own mask and score function, forward and backward on the CPU, with no compiler.

Three uses in a few lines each, and each compared with the same thing written naively: a sliding window, a prefix LM,
and a bias that is learned.

    python examples/04_flex_attention.py --length 2048
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

import lowbit
from lowbit.attention import masks
from lowbit.score.mod import MaskMod

HEADS, HEAD_DIM = 8, 64


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Attention as it is written in a textbook: all scores at once."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias
    return torch.softmax(scores.masked_fill(~mask, -math.inf), -1) @ v


def timed(run: Callable[[], Tensor], repeats: int = 3) -> tuple[Tensor, float]:
    """Return the result, and the best time in ms."""
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - start)
    return result, best * 1e3


def compare(name: str, mask: MaskMod, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Run one mask both ways, forward and backward."""
    length = q.shape[-2]
    block_mask = lowbit.create_block_mask(mask, None, None, length, length)
    dense = mask.dense(length)
    ours, ms = timed(lambda: lowbit.flex_attention(q, k, v, block_mask=block_mask))
    theirs, naive_ms = timed(lambda: naive(q, k, v, dense))
    inputs = (q, k, v)
    gradient = torch.randn_like(ours)
    for ours_grad, grad in zip(
        torch.autograd.grad(ours, inputs, gradient), torch.autograd.grad(theirs, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(ours_grad, grad, rtol=1e-3, atol=1e-4)
    print(
        f"{name:<22} {block_mask.sparsity():5.1f} % of blocks skipped   forward {ms:7.1f} ms, naive {naive_ms:7.1f} ms "
        "  "
        f"largest difference {(ours - theirs).abs().max():.1e}"
    )


def learn_a_bias(q: Tensor, k: Tensor, v: Tensor, steps: int) -> None:
    """Recover a hidden bias per head and distance from attention outputs alone: its gradient
    comes through flex_attention."""
    length = q.shape[-2]
    hidden = torch.randn(HEADS, 2 * length) * 0.5
    learned = torch.zeros_like(hidden, requires_grad=True)

    def attend(table: Tensor) -> Tensor:
        return lowbit.flex_attention(
            q, k, v, lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + length]
        )

    target = attend(hidden).detach()
    optimizer = torch.optim.Adam([learned], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = (attend(learned) - target).square().mean()
        loss.backward()
        optimizer.step()
        if step == 0:
            first = loss.item()
    index = torch.arange(length)[:, None] - torch.arange(length)[None, :] + length
    reference = naive(q, k, v, torch.ones(length, length, dtype=torch.bool), learned.detach()[:, index])
    difference = (attend(learned) - reference).abs().max().item()
    print(
        f"learned bias           loss {first:.2e} -> {loss.item():.2e} in {steps} steps   largest difference to naive "
        f"{difference:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024, help="tokens")
    parser.add_argument("--steps", type=int, default=30, help="of learning the bias")
    options = parser.parse_args()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, options.length, HEAD_DIM, requires_grad=True) for _ in range(3))
    window, prefix = masks.sliding_window(options.length // 8), masks.prefix_lm(options.length // 4)
    print(f"The sliding window, 16 tokens in small:\n{masks.sliding_window(4).text(16)}\n")
    compare(repr(window), window, q, k, v)
    compare(repr(prefix), prefix, q, k, v)
    short = (tensor.detach()[:, :, : min(256, options.length)] for tensor in (q, k, v))
    learn_a_bias(*short, options.steps)


if __name__ == "__main__":
    main()
