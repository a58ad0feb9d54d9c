# SPDX-License-Identifier: Apache-2.0
"""lowbit.fuse of short convolutions: LFM2, LFM2-MoE and LFM3 say what they said before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoders import answer, logits, prompt, transformers
from hybrids import close, same_gradients
from torch import Tensor, nn

import lowbit
from lowbit.models import recurrent_layers
from lowbit.models.fused_short_conv import FusedShortConv

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=96, bos_token_id=1,
    layer_types=["conv", "full_attention", "conv"],
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {"conv_bias": True}),
    "lfm2_moe": ("Lfm2Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1)),
}


def made(name: str) -> nn.Module:
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # norms are made of ones, biases of zeros
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    return model


def convs(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FusedShortConv)]


def fused(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    report = lowbit.fuse(other)
    assert len(convs(other)) == 2, report
    return other


@pytest.mark.parametrize("name", MODELS)
def test_logits_answers_and_caches_stay(name: str) -> None:
    model = made(name)
    other, ids, seen = fused(model), prompt(3, 11), torch.ones(3, 11, dtype=torch.long)
    seen[0, :4], seen[2, :1] = 0, 0
    of_tokens = seen.bool()
    close(logits(other, ids, attention_mask=seen)[of_tokens], logits(model, ids, attention_mask=seen)[of_tokens])
    close(logits(other, ids, use_cache=False), logits(model, ids, use_cache=False))
    for options in ({}, {"num_beams": 3}):
        options["attention_mask"] = seen
        assert torch.equal(answer(other, ids, **options), answer(model, ids, **options))
    caches = []
    with torch.no_grad():
        for first, second in ((model, other), (other, model)):
            begun = first(ids[:, :7], use_cache=True).past_key_values
            for part in (ids[:, 7:8], ids[:, 8:]):
                last = second(part, past_key_values=begun).logits[:, -1]
            close(last, logits(model, ids)[:, -1])
            caches.append(begun.layers[0].conv_states[0])
    assert caches[0].dtype == caches[1].dtype
    close(*caches)


@torch.no_grad()
def test_packed_sequences_are_kept_apart() -> None:
    conv = convs(fused(made("lfm2")))[0]
    x, ends = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 5, 6, 12])
    y = conv(x, cu_seq_lens_q=ends)
    close(y, torch.cat([conv(x[:, i:j]) for i, j in zip(ends, ends[1:], strict=False)], dim=1))


def test_gradients_and_training_run_on_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("lfm2")
    same_gradients(model, fused(model), monkeypatch, recurrent_layers, "causal_conv1d")


def test_later_changes_count() -> None:
    model, ids = made("lfm2"), prompt()
    other = fused(model)
    for each in (model, other):
        each.model.layers[0].conv.conv.weight.data.mul_(0.5)
        each.model.layers[2].conv.in_proj.register_forward_hook(lambda module, args, y: 2 * y)
    close(logits(other, ids), logits(model, ids))


def test_assisted_decoding_keeps_the_past_in_transformers_cache() -> None:
    """Past convolution states, which it crops."""
    model = made("lfm2")
    other, ids = fused(model), prompt(1)
    assert torch.equal(answer(other, ids, assistant_model=made("lfm2")), answer(model, ids))


def test_what_is_no_short_convolution_is_left_with_the_reason() -> None:
    model = made("lfm2")

    class Other(type(model.model.layers[0].conv)):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 1.01 * super().forward(*args, **kwargs)

    model.model.layers[0].conv.__class__ = Other
    model.model.layers[2].conv.in_proj.register_forward_hook(lambda *_: None)
    report = lowbit.fuse(model)
    assert report.left["model.layers.0.conv"] == "its results are not those of causal_conv1d"
    assert report.left["model.layers.2.conv"] == "hooks on in_proj"
