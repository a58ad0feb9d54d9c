# SPDX-License-Identifier: Apache-2.0
"""Time of a token and of a prompt through layers of Qwen3-30B-A3B with random weights, fused and not.

    python benchmarks/bench_mixture.py
    python benchmarks/bench_mixture.py --layers 4 --prompt 512

A token comes behind a prompt of 512. The layers have 128 experts of 2048 x 768, of which a token has 8, and 32 query and
4 key heads of 128. There is no head: what is measured is `model.model`. "reading" is the time to read the bytes that a
token needs, as core/bandwidth reads them in the same minute.
"""

from __future__ import annotations

import argparse
import copy

import torch
import transformers
from harness import MIB, Call, describe, duration, header, interleave, options, table
from torch import Tensor, nn

import lowbit
from lowbit import _C

CONFIGS = {
    "int4 32 int8": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
    "int4 32 float": lowbit.int4_weight_only(group_size=32),
}


def layers_of(args: argparse.Namespace, config: str) -> nn.Module:
    """A decoder, packed layer by layer. The weights of 16 experts are repeated."""
    settings = transformers.Qwen3MoeConfig(
        vocab_size=1024, hidden_size=2048, moe_intermediate_size=768, num_experts=args.experts, num_experts_per_tok=8,
        num_hidden_layers=args.layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128, norm_topk_prob=True,
        max_position_embeddings=40960, intermediate_size=6144,
    )  # fmt: skip
    dtype = getattr(torch, args.dtype)
    with torch.device("meta"):
        model = transformers.Qwen3MoeModel._from_config(settings, attn_implementation="lowbit", dtype=dtype).eval()
    model.rotary_emb = type(model.rotary_emb)(settings)
    model.norm, model.embed_tokens = model.norm.to_empty(device="cpu"), model.embed_tokens.to_empty(device="cpu")
    nn.init.ones_(model.norm.weight)
    nn.init.normal_(model.embed_tokens.weight)
    for layer in model.layers:
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            else:
                some = torch.randn(16, *parameter.shape[1:], dtype=dtype) * parameter.shape[-1] ** -0.5
                parameter.data = some.repeat(-(-len(parameter) // 16), 1, 1)[: len(parameter)]
        lowbit.quantize_(layer, CONFIGS[config])
    return model


class Calls:
    """A token behind the prompt, with a cache that forgets it, and a prompt."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.prompt = torch.randn(1, args.prompt, 2048, dtype=getattr(torch, args.dtype))
        self.tokens = torch.randn(64, 1, 1, 2048, dtype=self.prompt.dtype)
        self.cache = model(inputs_embeds=self.prompt, use_cache=True).past_key_values
        self.at = 0

    def token(self) -> Tensor:
        self.at = (self.at + 1) % len(self.tokens)
        if self.at == 0:
            self.cache.crop(self.args.prompt)
        return self.model(inputs_embeds=self.tokens[self.at], past_key_values=self.cache, use_cache=True)[0]

    def whole(self) -> Tensor:
        return self.model(inputs_embeds=self.prompt, use_cache=True)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--config", choices=CONFIGS, nargs="+", default=["int4 32 int8"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = options(parser, rounds=8, threads=2)
    print(describe(header()))
    lines = []
    with torch.inference_mode():
        for config in args.config:
            model = layers_of(args, config)
            held = sum(tensor.nbytes for tensor in model.layers.state_dict().values())
            of_experts = sum(p.nbytes for name, p in model.layers.named_parameters() if "experts" in name)
            reads = held - of_experts + of_experts * 8 / args.experts
            unfused = Calls(model, args)
            twin = layers_like(model)
            lowbit.fuse(twin)
            fused = Calls(twin, args)
            calls: dict[str, Call] = {}
            for name in ("token", "whole"):
                calls |= {f"{name} unfused": getattr(unfused, name), f"{name} fused": getattr(fused, name)}
            rates = [_C.read_bandwidth(256 * MIB, streams, args.threads, 3) for streams in (1, 4)]
            times = interleave(calls, rounds=args.rounds)
            reading = reads / max(rates) / 1e9
            for name, tokens in (("token", 1), ("whole", args.prompt)):
                of, other = (times[f"{name} {how}"].best_s for how in ("unfused", "fused"))
                lines.append([config, str(tokens), duration(reading) if tokens == 1 else "", duration(of), duration(other),
                              f"{of / other:.2f}x", f"{tokens / other:.0f}"])  # fmt: skip
    print(f"{args.layers} layers of {args.experts} experts, {args.dtype}, {args.threads} threads, best of {args.rounds}")
    print(table(["format", "tokens", "reading", "unfused", "fused", "gain", "tokens/s"], lines))


def layers_like(model: nn.Module) -> nn.Module:
    """Another model with the same weights in memory."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


if __name__ == "__main__":
    main()
