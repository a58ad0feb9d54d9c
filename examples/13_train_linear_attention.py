# SPDX-License-Identifier: Apache-2.0
"""Train a small model of Qwen3.5's kind on a CPU, whole and by LoRA, through transformers' functions and through
lowbit's ops, and compare the curves of the loss.

    pip install transformers peft
    python examples/13_train_linear_attention.py                  # a minute
    python examples/13_train_linear_attention.py --dtype bfloat16 --steps 200 --plot curves.png

Three layers of gated delta nets and one of attention, with random weights, learn the bytes of Python's standard
library. LoRA goes on from these weights and learns the same text in capitals. Both ways of computing begin with the same
weights, see the same batches and are trained by AdamW with 8-bit states, so the curves differ by roundings alone.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import lowbit

WAYS = ("transformers", "lowbit")
SHAPE = dict(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=32, linear_conv_kernel_dim=4, max_position_embeddings=1024, eos_token_id=0, bos_token_id=0,
    pad_token_id=0,
)  # fmt: skip


@dataclass
class Run:
    """The result of one training."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)  # per step, in nats per byte
    seconds: float = float("inf")  # of a step, the best


def library_text() -> bytes:
    """Return the sources of the standard library's modules, one after another."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"".join(path.read_bytes() for path in sources)


def batches(text: bytes, options: argparse.Namespace) -> Iterator[Tensor]:
    """Yield random pieces of the text, ``[batch, length]``, the same ones in each call."""
    numbers, generator = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(0)
    for _ in range(options.steps):
        starts = torch.randint(len(numbers) - options.length, (options.batch,), generator=generator)
        yield torch.stack([numbers[start : start + options.length] for start in starts.tolist()]).long()


def made(options: argparse.Namespace) -> nn.Module:
    """Return a model with random weights. Its attention is lowbit's in both ways, so that the layers of linear
    attention alone differ."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lowbit")
    return model.to(getattr(torch, options.dtype))


def train(model: nn.Module, text: bytes, lr: float, options: argparse.Namespace) -> Run:
    """Train the parameters that are not frozen."""
    run = Run(model.train())
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = lowbit.optim.AdamW8bit(wanted, lr=lr, min_8bit_size=1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for ids in batches(text, options):
        begin = time.perf_counter()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.seconds = min(run.seconds, time.perf_counter() - begin)
        schedule.step()
        run.losses.append(loss.item())
    return run


def with_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", exclude_modules="lm_head"))


def report(name: str, runs: dict[str, Run], options: argparse.Namespace) -> None:
    """Print the losses of the two ways, and how far apart they are."""
    ours, theirs = runs["lowbit"], runs["transformers"]
    trained = sum(each.numel() for each in ours.model.parameters() if each.requires_grad)
    print(f"\n{name}: {trained} numbers are trained\n{'step':>5}{'transformers':>14}{'lowbit':>10}")
    for step in sorted({0, *(options.steps * part // 5 - 1 for part in range(1, 6))} - {-1}):
        print(f"{step + 1:5}{theirs.losses[step]:14.4f}{ours.losses[step]:10.4f}")
    apart = max(abs(one - other) for one, other in zip(ours.losses, theirs.losses, strict=True))
    print(f"largest difference of {options.steps} steps: {apart:.6f}")
    print(f"a step: transformers {1e3 * theirs.seconds:.0f} ms, lowbit {1e3 * ours.seconds:.0f} ms")


def plot(all_runs: dict[str, dict[str, Run]], path: str) -> None:
    """Save the curves, one over the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(6, 4))
    for name, runs in all_runs.items():
        for way, width in (("transformers", 3), ("lowbit", 1)):
            axes.plot(runs[way].losses, label=f"{name}, {way}", linewidth=width)
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    plt.savefig(path)
    print(f"loss curves: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="bytes of a piece")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--plot", default="", help="file for the loss curves")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    text, base, fused = library_text(), made(options), {}
    for way in WAYS:
        fused[way] = copy.deepcopy(base)
    print(lowbit.fuse(fused["lowbit"]))
    whole = {way: train(fused[way], text, 1e-3, options) for way in WAYS}
    report("whole", whole, options)

    learned = whole["transformers"].model.state_dict()
    for way in WAYS:
        fused[way].load_state_dict(learned)
    adapted = {way: train(with_adapters(fused[way]), text.upper(), 3e-3, options) for way in WAYS}
    report("LoRA", adapted, options)
    if options.plot:
        plot({"whole": whole, "LoRA": adapted}, options.plot)


if __name__ == "__main__":
    main()
