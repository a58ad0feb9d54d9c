# SPDX-License-Identifier: Apache-2.0
"""The cost of int4 codes of experts in accuracy, by how they are chosen: a byte-level mixture of experts in the shape of
Qwen3-MoE, trained here on Python's standard library.

    python benchmarks/bench_expert_codes.py
    python benchmarks/bench_expert_codes.py --tokens 768 3072 --blend 0 8 32 128

Only the experts are packed. Per method: the error of the experts' results on float inputs that were held out, in dB (of
all layers together), and what the model loses on held-out bytes: the divergence from the float model, KL(float ||
packed), and the rise of the loss, in nats per byte. Mean and standard deviation over trainings from several seeds.

A calibration of `--tokens` bytes gives an expert tokens * (experts of a token) / experts rows on average, by default 96
and 384 for products of 256 and 128 channels. "blend m" adds m average rows of the layer to the moments of each expert:
lowbit adds `FEW_ROWS`. 0 leaves each expert its own rows alone, and "layer" gives every expert the moments of the layer.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import describe, header, table
from torch import Tensor, nn

import lowbit
from lowbit.quant import calibration as calibrations

PIECES = 48  # of 128 bytes, held out
LAYER = 10**9  # rows of the layer beside which an expert's own do not count


def example() -> object:
    """The module of examples/03_train_with_8bit_adam.py, which reads the text."""
    path = Path(__file__).parents[1] / "examples" / "03_train_with_8bit_adam.py"
    spec = importlib.util.spec_from_file_location("example_03", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Trained:
    """A model, text to calibrate it with and text that was held out, int64 [pieces, 129]."""

    model: nn.Module
    others: Tensor
    held_out: Tensor
    exact: list[Tensor] = field(default_factory=list)
    inputs: dict[str, list[tuple[Tensor, ...]]] = field(default_factory=dict)
    loss: float = 0.0


def trained(args: argparse.Namespace, seed: int) -> Trained:
    """Train a model, and keep what it says of the held-out text, and what its experts are given there."""
    import transformers

    torch.manual_seed(seed)
    source, generator = example(), torch.Generator().manual_seed(seed)
    text = source.library_text()
    held_out, text = text[-len(text) // 20 :], text[: -len(text) // 20]
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=256, moe_intermediate_size=128, intermediate_size=128, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=args.experts,
        num_experts_per_tok=args.each, norm_topk_prob=True, output_router_logits=True, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps, cycle_momentum=False)
    for _ in range(args.steps):
        ids = source.batch(text, generator)[:, :-1]
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.config.output_router_logits = False
    count = -(-max(args.tokens) // 128)
    others = torch.cat([source.batch(text, generator) for _ in range(-(-count // source.BATCH))])
    pieces = torch.Generator().manual_seed(0)
    some = torch.cat([source.batch(held_out, pieces) for _ in range(PIECES // source.BATCH)])
    found = Trained(model.eval(), others, some)
    handles = []
    for name, module in experts_of(model).items():
        kept = found.inputs.setdefault(name, [])
        handles.append(module.register_forward_hook(lambda _, given, y, kept=kept: kept.append((*given, y))))
    found.exact = logarithms(model, some)
    for handle in handles:
        handle.remove()
    found.loss = loss_of(found.exact, some)
    return found


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name.endswith("mlp.experts")}


@torch.no_grad()
def logarithms(model: nn.Module, pieces: Tensor) -> list[Tensor]:
    return [model(input_ids=part[:, :-1], use_cache=False).logits.log_softmax(-1) for part in pieces.split(8)]


def loss_of(logs: list[Tensor], pieces: Tensor) -> float:
    parts = zip(logs, pieces.split(8), strict=True)
    return statistics.fmean(-one.gather(2, part[:, 1:, None]).mean().item() for one, part in parts)


@torch.no_grad()
def measured(of: Trained, packed: nn.Module) -> tuple[float, float, float]:
    """Error of the experts in dB, KL(float || packed) and rise of the loss."""
    signal = noise = 0.0
    for name, module in experts_of(packed).items():
        for *given, y in of.inputs[name]:
            signal += float(y.square().sum())
            noise += float((module(*given) - y).square().sum())
    logs = logarithms(packed, of.held_out)
    divergence = statistics.fmean((p.exp() * (p - q)).sum(2).mean().item() for p, q in zip(of.exact, logs, strict=True))
    return 10 * math.log10(signal / noise), divergence, loss_of(logs, of.held_out) - of.loss


def methods(args: argparse.Namespace) -> list[tuple[str, object, int | None]]:
    """Names, configurations, and for those with a calibration how many rows of the layer are added."""

    def config(**options: object) -> object:
        return lowbit.int4_weight_only(32, **options)

    gptq = config(algorithm=lowbit.GPTQ())
    found: list[tuple[str, object, int | None]] = [("absmax", config(scale="absmax"), None), ("search", config(), None)]
    found.append(("search, calibrated", config(), calibrations.FEW_ROWS))
    found += [(f"GPTQ, blend {rows}" if rows else "GPTQ, own rows", gptq, rows) for rows in args.blend]
    return [*found, ("GPTQ, layer", gptq, LAYER)]


def run_of(of: Trained, tokens: int, config: object, rows: int | None) -> tuple[float, float, float, float]:
    """What `measured` returns, and the seconds to pack."""
    packed, few = copy.deepcopy(of.model), calibrations.FEW_ROWS
    only = lambda module, name: name.endswith("mlp.experts")  # noqa: E731
    batches = [of.others[at : at + 1, :-1] for at in range(tokens // 128)]
    begin = time.perf_counter()
    try:
        calibrations.FEW_ROWS = few if rows is None else rows
        lowbit.quantize_(packed, config, only, calibration=None if rows is None else batches)
    finally:
        calibrations.FEW_ROWS = few
    seconds = time.perf_counter() - begin
    return *measured(of, packed), seconds


def row_of(name: str, found: list[tuple[float, ...]], plain: list[tuple[float, ...]]) -> list[str]:
    """A line of the table, from what was found with each seed and by absmax with each seed."""
    db, kl, rise, seconds = ([one[place] for one in found] for place in range(4))
    spread = statistics.stdev(kl) if len(kl) > 1 else float("nan")
    part = statistics.fmean(kl) / statistics.fmean(one[1] for one in plain)
    mean = statistics.fmean
    return [
        name,
        f"{mean(db):.2f}",
        f"{mean(kl):.5f} +- {spread:.5f}",
        f"{part:.2f}",
        f"{mean(rise):.4f}",
        f"{mean(seconds):.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--each", type=int, default=4, help="experts of a token")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300, help="of training, 16 x 128 bytes each")
    parser.add_argument("--seeds", type=int, default=3, help="trainings")
    parser.add_argument("--tokens", type=int, nargs="+", default=[768, 3072], help="of a calibration")
    parser.add_argument("--blend", type=int, nargs="+", default=[0, 8, 32, 128])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(describe(header()))
    models = [trained(args, seed) for seed in range(args.seeds)]
    print(f"held-out loss {', '.join(f'{of.loss:.3f}' for of in models)} nats per byte")
    columns = ["", "experts dB", "KL to float", "of absmax's", "rise of loss", "s"]
    for tokens in args.tokens:
        rows: list[list[str]] = []
        plain: list[tuple[float, ...]] = []
        for name, config, blend in methods(args):
            found = [run_of(of, tokens, config, blend) for of in models]
            plain = plain or found
            rows.append(row_of(name, found, plain))
            print(*rows[-1], sep=" | ", file=sys.stderr)
        print(f"\n{tokens} tokens, {tokens * args.each / args.experts:.0f} rows an expert on average")
        print(table(columns, rows))


if __name__ == "__main__":
    main()
