# SPDX-License-Identifier: Apache-2.0
"""Train a small byte-level transformer on Python's own standard library, with torch's AdamW and with 8-bit
and 4-bit states.

    python examples/03_train_with_8bit_adam.py                          # about a minute
    python examples/03_train_with_8bit_adam.py --steps 300 --seeds 3    # as in docs/ops/optim.md

Every optimizer starts from the same weights and sees the same batches, so the curves differ by the
optimizer's state alone.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowbit

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch AdamW": lambda params, **options: torch.optim.AdamW(params, fused=True, **options),
    "AdamW8bit": lowbit.optim.AdamW8bit,
    "AdamW4bit": lowbit.optim.AdamW4bit,
}
CONTEXT, BATCH, WIDTH, HEADS = 128, 16, 128, 4


class Block(nn.Module):
    """Attention and MLP, normalized first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ByteModel(nn.Module):
    """Predict the next byte."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(ids) + self.positions.weight)))


@dataclass
class Run:
    """The result of one training."""

    losses: list[float] = field(default_factory=list)  # per step, in nats per byte
    final: float = 0.0  # on bytes that were held out
    state_bytes: int = 0
    step_ms: float = float("inf")  # of the optimizer alone, the best


def library_text() -> Tensor:
    """Return the sources of the standard library's modules, one after another, uint8."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def batch(text: Tensor, generator: torch.Generator) -> Tensor:
    """Return random pieces, ``[BATCH, CONTEXT + 1]``."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()


def loss_of(model: ByteModel, pieces: Tensor) -> Tensor:
    """Return the mean cross entropy of the next byte."""
    return functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def train(name: str, seed: int, text: Tensor, options: argparse.Namespace) -> Run:
    """Train one model."""
    torch.manual_seed(seed)
    model, run = ByteModel(options.layers), Run()
    optimizer = OPTIMIZERS[name](model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=options.lr, total_steps=options.steps, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(seed)
    held_out, text = text[-len(text) // 20 :], text[: -len(text) // 20]
    for _ in range(options.steps):
        loss = loss_of(model, batch(text, generator))
        optimizer.zero_grad()
        loss.backward()
        start = time.perf_counter()
        optimizer.step()
        run.step_ms = min(run.step_ms, 1e3 * (time.perf_counter() - start))
        schedule.step()
        run.losses.append(loss.item())
    with torch.no_grad():
        run.final = sum(loss_of(model, batch(held_out, generator)).item() for _ in range(16)) / 16
    run.state_bytes = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    return run


def plot(runs: dict[str, list[Run]], path: str) -> None:
    """Save the loss curves, smoothed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(6, 4))
    for name, of_name in runs.items():
        losses = torch.tensor([run.losses for run in of_name]).mean(0)
        width = max(1, len(losses) // 50)
        axes.plot(losses.unfold(0, width, 1).mean(-1), label=name)
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    plt.savefig(path)
    print(f"loss curves: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--plot", default="", help="file for the loss curves")
    options = parser.parse_args()
    text = library_text()
    print(
        f"{len(text) / 1e6:.1f} MB of Python, {options.steps} steps of {BATCH} x {CONTEXT} bytes, {options.seeds} "
        "seeds\n"
    )
    runs: dict[str, list[Run]] = {
        name: [train(name, seed, text, options) for seed in range(options.seeds)] for name in OPTIMIZERS
    }
    marks = [options.steps * part // 4 - 1 for part in (1, 2, 3, 4)]
    print(
        f"{'optimizer':12}"
        + "".join(f"{f'step {mark + 1}':>10}" for mark in marks)
        + f"{'held out':>10}{'':>10}{'state MB':>10}{'step ms':>10}"
    )
    base = sum(run.final for run in runs["torch AdamW"])
    for name, of_name in runs.items():
        width = max(1, options.steps // 20)
        curve = torch.tensor([run.losses for run in of_name]).mean(0)
        cells = [f"{curve[max(0, mark + 1 - width) : mark + 1].mean():10.3f}" for mark in marks]
        final = sum(run.final for run in of_name)
        print(
            f"{name:12}{''.join(cells)}{final / options.seeds:10.3f}{f'({100 * (final / base - 1):+.2f} %)':>10}"
            f"{of_name[0].state_bytes / 1e6:10.2f}{min(run.step_ms for run in of_name):10.2f}"
        )
    if options.plot:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
