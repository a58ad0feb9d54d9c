# SPDX-License-Identifier: Apache-2.0
"""explain() names for every quantized layer the row that then runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowbit
from lowbit import _C


def quantized() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Sequential(nn.Linear(48, 17)))
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    return model


@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_explained_row_is_the_one_that_runs(m: int, dtype: torch.dtype) -> None:
    model = quantized()
    entries = lowbit.explain(model, m=m, dtype=dtype)
    assert [entry.layer for entry in entries] == ["0", "2.0"]
    assert [entry.shape for entry in entries] == ["48 x 64", "17 x 48"]
    for entry, layer in zip(entries, (model[0], model[2][0]), strict=True):
        layer(torch.randn(m, layer.in_features, dtype=dtype))
        assert _C.last_kernel("linear") == entry.row
        assert _C.select_linear(m, *layer.op_args, str(dtype).removeprefix("torch.")) == entry.row
        assert all(reason for _, reason in entry.others)
        assert len(entry.others) == len(lowbit.kernels("linear")) - 1


def test_one_layer_and_its_table() -> None:
    explanation = lowbit.explain(quantized()[0])
    assert explanation[0].layer == "QuantLinear"
    assert explanation[0].row in repr(explanation) and "why not" in repr(explanation)
    reasons = {reason for _, reason in explanation[0].others}
    assert all(repr(explanation).count(reason) == 1 for reason in reasons) and len(explanation[0].others) > 3 * len(reasons)
    assert "<table>" in explanation._repr_html_()


def test_a_model_without_quantized_layers_says_so() -> None:
    assert repr(lowbit.explain(nn.Linear(3, 3))) == "no quantized linear layer here"


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="explain: module must be a torch.nn.Module, got Tensor"):
        lowbit.explain(torch.ones(3))


def test_a_mod_is_explained_as_its_program_and_blocks() -> None:
    slopes = torch.rand(4)
    alibi = lowbit.explain(lambda score, b, h, q, k: score + (k - q) * slopes[h])
    assert alibi.kind == "score_mod" and alibi.captured == ("float32 [4]",)
    assert "head: head1 = gather t0 head0" in alibi.forward and "scatter_add t0" in alibi.backward
    causal = lowbit.explain(lambda b, h, q, k: q >= k, q_len=512)
    assert causal.blocks == (6, 4, 6) and "6 empty (skipped), 4 partial" in repr(causal)
    assert lowbit.explain(lowbit.create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512)).blocks == (6, 4, 6)
    assert "changes nothing" in repr(lowbit.explain(lambda score, b, h, q, k: score))
    assert "runs through torch" in repr(lowbit.explain(lambda score, b, h, q, k: torch.lgamma(score)))
    with pytest.raises(TypeError, match="got a function of 2"):
        lowbit.explain(lambda q, k: q)
