# SPDX-License-Identifier: Apache-2.0
"""A QuantLinear prefers a row: it runs wherever it fits, on every thread, through copies, gradients and compilers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from settings import in_thread
from torch import nn

import lowbit
from lowbit import _C, testing
from lowbit.ops.linear import linear as linear_of_numbers

W4A8 = lowbit.int8_dynamic_activation_int4_weight(32)


def rows_of(config, m: int) -> list[str]:
    """Rows that can serve a layer of 64 x 96, the one that is taken by itself first."""
    call = (m, *config.spec(torch.float32).op_args(64, 96), "float32")
    return [row["name"] for row in _C.explain_linear(*call) if row["chosen"] or row["reason"] == "a better row fits"]


@pytest.fixture(params=[W4A8, lowbit.int8_weight_only(), lowbit.float_weight()], ids=str)
def layer(request):
    model = nn.Sequential(nn.Linear(96, 64))
    lowbit.quantize_(model, request.param)
    model[0].config = request.param
    return model[0]


def test_every_row_that_fits_can_be_preferred(layer, subtests):
    x = torch.randn(20, 96)
    wanted = layer.to_linear()(x)
    for row in rows_of(layer.config, 20):
        with subtests.test(row):
            layer.prefer(row)
            y = layer(x)
            assert _C.last_kernel("linear") == row == layer.row and (y - wanted).norm() < 0.05 * wanted.norm()
            assert lowbit.explain(layer, m=20)[0].row == row and row in repr(layer)
    layer.prefer("")
    layer(x)
    assert _C.last_kernel("linear") == rows_of(layer.config, 20)[0] and "prefers" not in repr(layer)


def test_a_call_that_the_row_cannot_serve_takes_the_first_that_can():
    amx = [row for row in _C.kernels("linear") if row["name"] == "linear_int4_int8_amx"]
    if not amx or not amx[0]["available"]:
        pytest.skip("no row here refuses some calls of its format: amx is not on this machine")
    model = nn.Sequential(nn.Linear(96, 64))
    lowbit.quantize_(model, W4A8)
    model[0].prefer("linear_int4_int8_amx")
    for m, row in ((20, "linear_int4_int8_amx"), (1, rows_of(W4A8, 1)[0])):
        model(torch.randn(m, 96))
        assert _C.last_kernel("linear") == row == lowbit.explain(model, m=m)[0].row


def test_a_row_of_another_format_is_never_taken(layer):
    other = "linear_int8_int8_scalar"
    layer.prefer(other)
    layer(torch.randn(20, 96))
    assert _C.last_kernel("linear") == rows_of(layer.config, 20)[0]
    assert dict(lowbit.explain(layer, m=20)[0].others)[other]


def test_a_forced_row_comes_before_it(layer):
    first, *_, last = rows_of(layer.config, 20)
    layer.prefer(last)
    with lowbit.force_kernel(first):
        layer(torch.randn(20, 96))
        assert _C.last_kernel("linear") == first == lowbit.explain(layer, m=20)[0].row


def test_the_layer_carries_it_not_the_thread(layer):
    *_, last = rows_of(layer.config, 20)
    layer.prefer(last)
    assert in_thread(lambda: (layer(torch.randn(20, 96)), _C.last_kernel("linear"))[1]) == last


def test_copies_and_pickles_keep_it_and_state_dicts_do_not_know_it(layer):
    names = set(layer.state_dict())
    *_, last = rows_of(layer.config, 20)
    layer.prefer(last)
    assert set(layer.state_dict()) == names
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        other(torch.randn(20, 96))
        assert _C.last_kernel("linear") == other.row == last
    unset = lowbit.QuantLinear(96, 64, spec=layer.spec)
    unset.load_state_dict(layer.state_dict())
    assert unset.row == "" and unset.row_number == 0


def test_dequantize_forgets_it(layer):
    layer.prefer(rows_of(layer.config, 20)[-1])
    lowbit.dequantize_(layer)
    assert "row" not in layer.__dict__ and "row_number" not in layer.__dict__


def test_gradients_go_by_the_same_row(layer):
    *_, last = rows_of(layer.config, 20)
    layer.prefer(last)
    x = torch.randn(20, 96, requires_grad=True)
    layer(x).sum().backward()
    assert _C.last_kernel("linear") == last and x.grad is not None
    layer.bias.requires_grad_(True)
    layer(x.detach())
    assert _C.last_kernel("linear") == last


def test_a_fused_mlp_asks_its_layers(gated_mlp):
    lowbit.quantize_(gated_mlp, W4A8)
    lowbit.fuse_gated_mlps(gated_mlp)
    mlp, row = gated_mlp["mlp"], "linear_int4_int8_scalar"
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        layer.prefer(row)
    mlp(torch.randn(3, 64))
    assert _C.last_kernel("linear") == row


def test_compiled_and_exported_programs_keep_it(layer):
    *_, last = rows_of(layer.config, 20)
    layer.prefer(last)
    x = torch.randn(20, 96)
    wanted = layer(x)
    del layer.config
    for run in (torch.compile(layer, backend="aot_eager", fullgraph=True), torch.export.export(layer, (x,)).module()):
        layer_free = run(x)
        assert _C.last_kernel("linear") == last and torch.equal(layer_free, wanted)


def test_a_name_of_no_row_is_refused(layer):
    with pytest.raises(ValueError, match="row_number: linear has no row 'linear_abacus', wanted one of linear_"):
        layer.prefer("linear_abacus")
    with pytest.raises(ValueError, match="op must be one of"):
        _C.row_number("abacus", "linear_abacus")
    assert layer.row == ""


def test_every_row_has_a_number_of_its_own():
    names = [str(row["name"]) for row in testing.rows("linear")]
    numbers = [_C.row_number("linear", name) for name in names]
    assert len(set(numbers)) == len(names) and all(0 < number < 2**63 for number in numbers)


def test_a_number_of_no_row_is_no_preference(layer):
    x = torch.randn(20, 96)
    y = linear_of_numbers(x, layer.weight, layer.op_args, layer.bias, row=12345)
    assert _C.last_kernel("linear") == rows_of(layer.config, 20)[0] and torch.equal(y, layer(x))
