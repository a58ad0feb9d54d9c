# SPDX-License-Identifier: Apache-2.0
"""Answers of models with latent attention behind prompts, in tokens a second of ``generate``, fused and not.

    python benchmarks/bench_latent.py
    python benchmarks/bench_latent.py --only lite --layers 4 --prompts 500 2000

Layers have the shapes of DeepSeek-V2-Lite and GLM-4.7-Flash, the first with a dense MLP, the others with 64 experts, and
random weights: int4 in groups of 32 with int8 activations. The vocabulary has 8192 words. Each answer goes on from a
cache of the prompt, and a round takes the models in turns; the time of an answer of 2 tokens is subtracted.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
import transformers
from harness import describe, header, options, table
from torch import nn

import lowbit

COMMON: dict[str, Any] = dict(
    vocab_size=8192, hidden_size=2048, kv_lora_rank=512, qk_rope_head_dim=64, n_routed_experts=64,
    max_position_embeddings=32768, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "lite": ("DeepseekV2", dict(intermediate_size=10944, moe_intermediate_size=1408, n_shared_experts=2, num_experts_per_tok=6, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=1, topk_method="greedy")),
    "flash": ("Glm4MoeLite", dict(intermediate_size=10240, moe_intermediate_size=1536, n_shared_experts=1, num_experts_per_tok=4, num_attention_heads=20, num_key_value_heads=20, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, n_group=1, topk_group=1)),
}  # fmt: skip
CONFIG = lowbit.int8_dynamic_activation_int4_weight(group_size=32)


def model_of(name: str, layers: int) -> nn.Module:
    """A model that is made and packed layer by layer. The weights of 8 experts are repeated."""
    kind, shape = SHAPES[name]
    more = {"mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1)} if kind == "Glm4MoeLite" else {}
    settings = getattr(transformers, f"{kind}Config")(**COMMON | shape | more, num_hidden_layers=layers)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(settings, attn_implementation="lowbit").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    for part in (model.model.embed_tokens, model.model.norm, model.lm_head, *model.model.layers):
        part.to_empty(device="cpu")
        for buffer in part.buffers():
            buffer.zero_()
        for parameter in part.parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            else:
                some = torch.randn(8, *parameter.shape[1:]) * parameter.shape[-1] ** -0.5
                parameter.data = some.repeat(-(-len(parameter) // 8), 1, 1)[: len(parameter)]
        if part is not model.model.embed_tokens and part is not model.lm_head:
            lowbit.quantize_(part, CONFIG) if any(p.dim() > 1 for p in part.parameters()) else None
    lowbit.quantize_(model, CONFIG, filter_fn=lambda module, _: module is model.lm_head)
    return model


class Answers:
    """Answers of a model behind prompts of these lengths."""

    def __init__(self, model: nn.Module, prompts: list[int]) -> None:
        self.model, self.held = model, {}
        for length in prompts:
            ids = torch.randint(3, 8192, (1, length), generator=torch.Generator().manual_seed(length))
            with torch.inference_mode():
                self.held[length] = ids, model(ids, use_cache=True, logits_to_keep=1).past_key_values

    def seconds(self, length: int, tokens: int) -> float:
        ids, cache = self.held[length]
        cache.crop(length - 1 - cache.get_seq_length())
        begin = time.perf_counter()
        self.model.generate(
            ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False, eos_token_id=None,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip
        return time.perf_counter() - begin

    def speed(self, length: int, tokens: int) -> float:
        """Tokens a second."""
        first = self.seconds(length, 2)
        return tokens / (self.seconds(length, 2 + tokens) - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SHAPES, nargs="+", default=[*SHAPES])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--tokens", type=int, default=16)
    given = options(parser, rounds=5, threads=2)
    transformers.logging.set_verbosity_error()
    print(describe(header()))
    lines = []
    for name in given.only:
        model = model_of(name, given.layers)
        twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        lowbit.fuse(twin)
        answers = [Answers(each, given.prompts) for each in (model, twin)]
        for length in given.prompts:
            rounds = [[each.speed(length, given.tokens) for each in answers] for _ in range(given.rounds)]
            slow, fast = map(max, zip(*rounds, strict=True))
            lines.append([name, str(length), f"{slow:.1f}", f"{fast:.1f}", f"{fast / slow:.2f}x"])
    print(f"{given.layers} layers, float32, {given.threads} threads, best of {given.rounds}, tokens/s")
    print(table(["shape", "prompt", "unfused", "fused", "gain"], lines))


if __name__ == "__main__":
    main()
