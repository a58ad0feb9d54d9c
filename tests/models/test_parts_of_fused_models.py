# SPDX-License-Identifier: Apache-2.0
"""A fused model of which a part is taken apart: what is left of it computes what an unfused model does."""

from __future__ import annotations

import pytest
import torch
from decoders import answer, logits, made, prompt

import lowbit

PARTS = ("model.layers.0", "model.layers.1", "model.layers.1.mlp", "model.layers.0.self_attn", "model.layers", "model", "lm_head")


@pytest.mark.parametrize("again", [False, True], ids=["float", "packed again"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_may_become_float(part: str, again: bool) -> None:
    plain, model = made("llama"), made("llama")
    lowbit.fuse(model)
    answer(model, prompt())  # which notes what it may keep
    for each in (plain, model):
        lowbit.dequantize_(each.get_submodule(part))
        if again:
            lowbit.quantize_(each.get_submodule(part), lowbit.int8_weight_only())
    torch.testing.assert_close(logits(model, prompt()), logits(plain, prompt()), rtol=1e-4, atol=1e-4)
    assert torch.equal(answer(model, prompt()), answer(plain, prompt()))
    lowbit.fuse(model)
    assert torch.equal(answer(model, prompt()), answer(plain, prompt()))


def test_a_norm_may_be_parametrized() -> None:
    class Same(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight

    model = made("llama", attention="sdpa")
    wanted = logits(model, prompt())
    lowbit.fuse(model)
    torch.nn.utils.parametrize.register_parametrization(model.model.norm, "weight", Same())
    torch.testing.assert_close(logits(model, prompt()), wanted, rtol=1e-4, atol=1e-4)
