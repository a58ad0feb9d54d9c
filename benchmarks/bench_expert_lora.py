# SPDX-License-Identifier: Apache-2.0
"""A LoRA step of a layer of experts, Qwen3-30B-A3B's: over bfloat16 experts by peft, over packed ones of lowbit, and over
nf4 experts of bitsandbytes.

    python benchmarks/bench_expert_lora.py
    python benchmarks/bench_expert_lora.py --bitsandbytes FOLDER --experts 32 --tokens 64 512

A step is forward, backward and a fused AdamW; the adapter (peft's target_parameters, rank 8) is around both products of
all experts. FOLDER holds another build of bitsandbytes, such as `pip install --no-deps --target FOLDER
bitsandbytes-cpu-fork`; without it, the installed package takes part if there is one. bitsandbytes packs parameters of
three dimensions by `replace_parameter_4bit`; peft's adapters on them fail in their second step, which the run then
tells. Experts as a ModuleList of `Linear4bit`, with peft's adapters around each, are the other way to train with it.
"MB" are the bytes of the frozen weights, without the scales of bitsandbytes, which are no parameters.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["LOWBIT_BITSANDBYTES"] = "0"
if "--bitsandbytes" in sys.argv[:-1]:  # before peft imports the installed one
    sys.path.insert(0, sys.argv[sys.argv.index("--bitsandbytes") + 1])

import harness
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import lowbit

RANK = 8
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
PACKED = {
    "int4 g32, float activations": lowbit.int4_weight_only(group_size=32),
    "int4 g32, int8 activations": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
    "nf4 g64": lowbit.nf4_weight_only(group_size=64),
}


class Layer(nn.Module):
    """A router and experts of transformers."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = transformers.Qwen3MoeConfig(
            hidden_size=args.hidden, moe_intermediate_size=args.inner, num_experts=args.experts,
            num_experts_per_tok=args.each, experts_implementation=args.implementation,
        )  # fmt: skip
        config._experts_implementation = args.implementation
        self.router, self.each = nn.Linear(args.hidden, args.experts, bias=False), args.each
        self.experts = Qwen3MoeExperts(config)
        for parameter in self.experts.parameters():
            some = torch.randn(4, *parameter.shape[1:]) * parameter.shape[-1] ** -0.5
            parameter.data = some.repeat(-(-len(parameter) // 4), 1, 1)[: len(parameter)].bfloat16()
        self.router.weight.data = self.router.weight.data.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        top = self.router(x).float().softmax(-1).topk(self.each, -1)
        weights = top.values / top.values.sum(-1, keepdim=True)
        return self.experts(x, top.indices, weights.to(x.dtype))


class Separate(nn.Module):
    """The same experts, each with linear layers of its own."""

    def __init__(self, layer: Layer, linear: Callable[[Tensor], nn.Module]) -> None:
        super().__init__()
        self.router, self.each = copy.deepcopy(layer.router), layer.each
        gate_up, down = layer.experts.gate_up_proj.data, layer.experts.down_proj.data
        self.first = nn.ModuleList(linear(weight) for weight in gate_up)
        self.second = nn.ModuleList(linear(weight) for weight in down)

    def forward(self, x: Tensor) -> Tensor:
        top = self.router(x).float().softmax(-1).topk(self.each, -1)
        weights = top.values / top.values.sum(-1, keepdim=True)
        y = torch.zeros_like(x, dtype=torch.float32)
        for expert in top.indices.unique().tolist():
            token, place = (top.indices == expert).nonzero(as_tuple=True)
            gate, up = self.first[expert](x[token]).chunk(2, -1)
            part = self.second[expert](nn.functional.silu(gate) * up).float() * weights[token, place, None]
            y = y.index_add(0, token, part)
        return y.to(x.dtype)


def with_adapter(model: nn.Module, separate: bool = False) -> nn.Module:
    if separate:
        names = [
            name
            for name, module in model.named_modules()
            if name.partition(".")[0] in ("first", "second") and "." in name
        ]
        config = LoraConfig(r=RANK, target_modules=names)
    else:
        config = LoraConfig(r=RANK, target_modules=[], target_parameters=BOTH)
    return get_peft_model(model, config)


def step_of(model: nn.Module, x: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def of_bitsandbytes(layer: Layer) -> dict[str, nn.Module]:
    """Layers whose experts are packed by the package, by how, or nothing if it is not there."""
    try:
        import bitsandbytes
        from bitsandbytes.nn.parametrize import replace_parameter_4bit
    except ImportError as error:
        print(f"bitsandbytes takes no part: {error}")
        return {}
    print(f"bitsandbytes {bitsandbytes.__version__} of {os.path.dirname(bitsandbytes.__file__)}")
    whole = copy.deepcopy(layer)
    for key in ("gate_up_proj", "down_proj"):
        replace_parameter_4bit(whole.experts, key, quant_type="nf4", blocksize=64)

    def linear(weight: Tensor) -> nn.Module:
        made = bitsandbytes.nn.Linear4bit(
            weight.shape[1], weight.shape[0], bias=False, compute_dtype=weight.dtype, quant_type="nf4"
        )
        made.weight = bitsandbytes.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4")
        return made.to("cpu")

    return {"bitsandbytes, nf4 parameters": whole, "bitsandbytes, nf4 linear layers": Separate(layer, linear)}


def steps(args: argparse.Namespace) -> dict[str, tuple[nn.Module, int]]:
    """Layers with adapters, and the bytes of their frozen weights."""
    torch.manual_seed(0)
    layer = Layer(args)
    found: dict[str, Any] = {"bfloat16, peft": layer}
    for name, config in PACKED.items():
        packed = copy.deepcopy(layer)
        lowbit.quantize_(packed, config, lambda module, name: name == "experts")
        found[f"lowbit, {name}"] = packed
    found |= of_bitsandbytes(layer)
    made = {}
    for name, model in found.items():
        size = sum(p.nbytes for key, p in model.named_parameters() if "router" not in key)
        try:
            adapted = with_adapter(model, isinstance(model, Separate))
            step = step_of(adapted, torch.randn(4, args.hidden).bfloat16())
            for _ in range(2):  # peft leaves its parametrization beside another one, and fails when it comes back
                step()
        except Exception as error:  # a package of others may refuse what it is given
            print(f"{name} takes no part: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        made[name] = adapted, size
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--each", type=int, default=8, help="experts of a token")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--implementation", default="grouped_mm", help="of transformers, for float experts")
    parser.add_argument("--bitsandbytes", help="a folder with another build of it")
    args = harness.options(parser, rounds=3)
    run, results = harness.Run(), {}
    models = steps(args)
    for tokens in args.tokens:
        x = torch.randn(tokens, args.hidden).bfloat16()
        calls = {name: step_of(model, x) for name, (model, _) in models.items()}
        times = harness.interleave(calls, rounds=args.rounds, sample_s=0.0, warmup=1, slow_s=60.0)
        plain = times["bfloat16, peft"].best_s
        rows = [
            [name, harness.duration(time.best_s), f"{time.best_s / plain:.2f}x", f"{models[name][1] / 1e6:.0f}"]
            for name, time in times.items()
        ]
        print(f"\n{harness.table([f'LoRA step, {tokens} tokens', 'best', 'of bfloat16', 'MB'], rows)}", flush=True)
        results[str(tokens)] = {name: time.best_s for name, time in times.items()}
    run.end(args.out, results)


if __name__ == "__main__":
    main()
