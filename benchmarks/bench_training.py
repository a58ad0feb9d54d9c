# SPDX-License-Identifier: Apache-2.0
"""The loss over a large vocabulary, forward and backward: linear_cross_entropy, torch's cross entropy chunk by chunk
under autograd, TRL's chunked log-probabilities, and the op of a newer torch in an environment of its own.

    python benchmarks/bench_training.py
    python benchmarks/bench_training.py --tokens 512 --rounds 1 --only "lowbit bfloat16 head" "chunks"
    python benchmarks/bench_training.py --torch-python ~/torch-2.14/bin/python

A step makes the gradient of hidden states, and with --train-head that of a float head. Memory is the peak of the
process during a step, above what it had before: results and scratch memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Call, describe, duration, header, interleave, options, table
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit import testing

CHUNK = 256  # rows of a chunk of the plain loss
# nn.LinearCrossEntropyLoss of torch 2.14 owns its head.
NEWER = """
import json, sys, time, torch
tokens, vocabulary, hidden, dtype, trains, threads, rounds = json.loads(sys.argv[1])
torch.set_num_threads(threads)
of = getattr(torch, dtype)
x = torch.randn(tokens, hidden).to(of).requires_grad_()
layer = torch.nn.LinearCrossEntropyLoss(hidden, vocabulary, bias=False, dtype=of)
layer.requires_grad_(trains)
labels = torch.randint(0, vocabulary, (tokens,))
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
best = float("inf")
for _ in range(rounds):
    x.grad = None
    layer.zero_grad()
    open("/proc/self/clear_refs", "w").write("5")
    before, begin = peak(), time.perf_counter()
    layer(x, labels).backward()
    best = min(best, time.perf_counter() - begin)
print(json.dumps([torch.__version__, best, (peak() - before) / 1024]))
"""


def peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def peak_mib(call: Call) -> float:
    """The memory that a call needs at most, above what the process has before it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_kib()
    call()
    return (peak_kib() - before) / 1024


def in_chunks(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    def loss(rows: Tensor, head: Tensor, of_rows: Tensor) -> Tensor:
        return functional.cross_entropy((rows @ head.T).float(), of_rows, reduction="sum")

    parts = zip(x.split(CHUNK), labels.split(CHUNK), strict=True)
    losses = [checkpoint(loss, rows, head, of_rows, use_reentrant=False) for rows, of_rows in parts]
    return torch.stack(losses).sum() / len(labels)


def by_trl(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    return -_ChunkedLogProbFunction.apply(
        x, head, None, labels, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs",)
    )[0].mean()


def steps(args: argparse.Namespace) -> dict[str, Call]:
    dtype = getattr(torch, args.dtype)
    x = torch.randn(args.tokens, args.hidden).to(dtype).requires_grad_()
    head = (torch.randn(args.vocabulary, args.hidden, dtype=dtype) / args.hidden**0.5).requires_grad_(args.train_head)
    labels = torch.randint(0, args.vocabulary, (args.tokens,))

    def step(loss: Callable[[], Tensor]) -> Call:
        def call() -> None:
            x.grad = head.grad = None
            loss().backward()

        return call

    found = {f"lowbit {args.dtype} head": step(lambda: lowbit.linear_cross_entropy(x, head, labels))}
    if not args.train_head:
        config = lowbit.int8_dynamic_activation_int8_weight()
        layer = torch.nn.Linear(args.hidden, args.vocabulary, bias=False, dtype=dtype)
        layer.weight = torch.nn.Parameter(head.detach(), requires_grad=False)
        packed = lowbit.QuantLinear.from_linear(layer, config.spec(dtype))
        found["lowbit int8 head"] = step(lambda: lowbit.linear_cross_entropy(x, packed.weight, labels, packed.stored))
    found["torch in chunks"] = step(lambda: in_chunks(x, head, labels))
    if importlib.util.find_spec("trl"):
        found["TRL"] = step(lambda: by_trl(x, head, labels))
    return {name: call for name, call in found.items() if not args.only or any(part in name for part in args.only)}


def of_newer_torch(args: argparse.Namespace) -> list[str]:
    given = [args.tokens, args.vocabulary, args.hidden, args.dtype, args.train_head, args.threads, args.rounds]
    command = [args.torch_python, "-c", NEWER, json.dumps(given)]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    version, best_s, mib = json.loads(made.stdout.splitlines()[-1])
    return [f"torch {version}, LinearCrossEntropyLoss", duration(best_s), f"{mib:.0f} MiB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=248_320)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", choices=testing.DTYPES, default="bfloat16")
    parser.add_argument("--train-head", action="store_true", help="the gradient of the head too")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of what is timed")
    parser.add_argument("--torch-python", help="the interpreter of another torch, with nn.LinearCrossEntropyLoss")
    args = options(parser, rounds=2, threads=2)
    print(describe(header()))
    calls = steps(args)
    memory = {name: peak_mib(call) for name, call in calls.items()}  # warms up too
    times = interleave(calls, rounds=args.rounds)
    lines = [[name, duration(times[name].best_s), f"{memory[name]:.0f} MiB"] for name in calls]
    if args.torch_python:
        lines.append(of_newer_torch(args))
    print(
        f"{args.tokens} rows of {args.hidden}, {args.vocabulary} words, {args.threads} threads, best of {args.rounds}"
    )
    print(table(["loss", "forward and backward", "memory"], lines))


if __name__ == "__main__":
    main()
