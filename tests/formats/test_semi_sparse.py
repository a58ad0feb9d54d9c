# SPDX-License-Identifier: Apache-2.0
"""2:4 int8 weights: what is pruned, every kernel row against float64 and against dense int8, files, refusals."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import _C, testing
from lowbit.formats import LinearSpec
from lowbit.formats.text import config_of
from lowbit.reference import layout
from lowbit.reference.quantize import QuantizedWeight, prune, quantize
from lowbit.testing import LinearCase

FORMAT = "int8_semi_sparse"
GROUP_SIZES = (0, 32, 64, 256)
CONFIGS = [lowbit.semi_sparse_weight, lowbit.int8_dynamic_activation_int8_semi_sparse_weight]


def rows(op: str, start: str = "") -> list[str]:
    return [str(row["name"]) for row in testing.rows(op) if row["available"] and str(row["name"]).startswith(start)]


def forced(row: str, call: object) -> object:
    previous = _C.force_kernel(row)
    try:
        return call()
    finally:
        _C.force_kernel(previous)


def semi_sparse_codes(n: int, k: int, *values: int) -> Tensor:
    """Random codes, or these, of which two of each four are not 128."""
    codes = torch.randint(256, (n, k), dtype=torch.uint8)
    if values:
        codes = torch.tensor(values, dtype=torch.uint8)[torch.randint(len(values), (n, k))]
    return torch.where(prune(torch.rand(n, k)) != 0, codes, 128).byte()


def linear(k: int = 64, n: int = 48, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(k, n, bias=bias))


@pytest.mark.core
@pytest.mark.parametrize("row", rows("quantize"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_two_largest_of_each_four_are_packed_as_the_reference_says(row: str, dtype: torch.dtype) -> None:
    for (n, k), group_size in itertools.product(((1, 4), (17, 36), (40, 64), (33, 260)), GROUP_SIZES):
        weight = (torch.randn(n, k) * 2.0 ** torch.randint(-9, 9, (n, 1))).to(dtype)
        weight[0, :4] = torch.tensor([1, -1, 1, 1])  # the first two of what is alike
        packed = forced(row, lambda w=weight, g=group_size: testing.pack_weight(w, FORMAT, g))
        wanted = quantize(weight, FORMAT, group_size, "symmetric")
        assert torch.equal(packed, layout.pack(wanted))
        got = testing.decode_weight(packed, n, k, FORMAT, group_size, "symmetric")
        assert torch.equal(got.codes, wanted.codes) and (got.codes[0, 2:4] == 128).all()


@pytest.mark.parametrize("row", [row for row in rows("repack") if "gguf" not in row])
def test_layouts_give_the_same_codes_and_bytes(row: str) -> None:
    for (n, k), group_size in itertools.product(((1, 4), (17, 36), (33, 260)), GROUP_SIZES):
        codes, groups = semi_sparse_codes(n, k), -(-k // group_size) if group_size else 1
        weight = QuantizedWeight.of(codes, torch.rand(n, groups) + 0.5, None, FORMAT, group_size)
        shape = n, k, FORMAT, group_size
        panels = forced(row, lambda w=weight, s=shape: testing.repack(layout.row_major(w), "row-major", _C.LAYOUT, *s))
        assert torch.equal(panels, layout.pack(weight))
        back = forced(row, lambda p=panels, s=shape: testing.repack(p, _C.LAYOUT, "row-major", *s))
        assert torch.equal(back, layout.row_major(weight))


@pytest.mark.parametrize("row", rows("dequantize", "dequantize_panels"))
def test_dequantize_is_the_reference(row: str) -> None:
    for (n, k), group_size in itertools.product(((1, 4), (17, 36), (40, 260)), GROUP_SIZES):
        packed = testing.pack_weight(torch.randn(n, k), FORMAT, group_size)
        wanted = testing.decode_weight(packed, n, k, FORMAT, group_size, "symmetric").decode()
        args = n, k, _C.FORMATS[FORMAT], group_size, False
        got = forced(row, lambda p=packed, a=args: torch.ops.lowbit.dequantize(p, *a))
        assert ((got - wanted).abs() <= 2.0**-23 * wanted.abs()).all()
        assert ((got != 0).unflatten(1, (-1, 4)).sum(2) <= 2).all()


X_FORMATS = [name for name in _C.FORMAT_FACTS[FORMAT]["x_formats"]]
ROWS = rows("linear", f"linear_{FORMAT}_")


@pytest.mark.core
@pytest.mark.parametrize("x_format", X_FORMATS)
@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_within_its_budget_of_float64(row: str, x_format: str) -> None:
    sizes = itertools.product((1, 2, 3, 5, 8, 15, 16, 33, 70), (1, 17, 48), (4, 32, 36, 100, 260, 576))
    served = 0
    for index, (m, n, k) in enumerate(sizes):
        bias, activation, mul, add = testing.POST_OPS[index * 7 % len(testing.POST_OPS)]
        dtype, group_size = testing.DTYPES[index % 4 % 3], GROUP_SIZES[index % 4]
        case = LinearCase(m, n, k, dtype, FORMAT, group_size, "symmetric", x_format, bias, activation, mul, add)
        if not testing.serves(row, case):
            continue
        data = testing.make_data(case)
        testing.assert_within(testing.run_linear(case, data, row), data.wanted, data.allowed, f"{row} {case}")
        served += 1
    assert served >= 12 or x_format_is_of_other_rows(row, x_format)


def x_format_is_of_other_rows(row: str, x_format: str) -> bool:
    return (x_format == "float") == ("_int8_semi_sparse_int8_" in row) or "bf16" in row


@pytest.mark.core
@pytest.mark.parametrize("row", [row for row in ROWS if f"linear_{FORMAT}_int8_" in row])
def test_integer_rows_have_the_bits_of_dense_int8(row: str) -> None:
    """Of random codes, and of those with the largest sums: all codes 0 or 255, all activations 127 of one sign."""
    for m, group_size in itertools.product((1, 2, 3, 4, 5, 9, 15, 16, 40), (0, 32, 128)):
        for k, values in ((100, ()), (1024, (0, 255)), (1024, (0,)), (4160, (255,))):
            x_format = "int8_group" if group_size else "int8_row_asymmetric" if m % 2 else "int8_row"
            n, groups = 37, -(-k // group_size) if group_size else 1
            codes, scale = semi_sparse_codes(n, k, *values), torch.rand(n, groups) + 0.5
            x = torch.ones(m, k) if values else torch.randn(m, k)
            cases = [LinearCase(m, n, k, "float32", of, group_size, "symmetric", x_format) for of in (FORMAT, "int8")]
            if not testing.serves(row, cases[0]):
                continue
            packed = [testing.pack_codes(codes, scale, None, of, group_size) for of in (FORMAT, "int8")]
            previous = _C.force_kernel(row)
            try:
                got = torch.ops.lowbit.linear(x, packed[0], *cases[0].op_args)
                assert _C.last_kernel("linear") == row
            finally:
                _C.force_kernel(previous)
            assert torch.equal(got, torch.ops.lowbit.linear(x, packed[1], *cases[1].op_args)), cases[0]


@pytest.mark.parametrize("row", [row for row in ROWS if f"linear_{FORMAT}_int8_" in row])
def test_sums_longer_than_an_int32_holds_are_cut(row: str) -> None:
    n, k = 16, 2**17 + 192
    case = LinearCase(1, n, k, "float32", FORMAT, 0, "symmetric", "int8_row")
    if not testing.serves(row, case):
        return
    codes = semi_sparse_codes(n, k, 0)
    packed = testing.pack_codes(codes, torch.ones(n, 1), None, FORMAT)
    got = forced(row, lambda: torch.ops.lowbit.linear(torch.ones(1, k), packed, *case.op_args))
    assert ((got.double() + 128 * (k / 2)).abs() <= 2.0**-22 * 128 * k).all()


@pytest.mark.parametrize("make", CONFIGS)
@pytest.mark.parametrize("value", [2.0**127, 2.0**-149, 2.0**-126])
def test_extreme_finite_weights_stay_finite_and_semi_sparse(make: object, value: float) -> None:
    model = linear(bias=False)
    model[0].weight.data = torch.full((48, 64), value) * torch.randn(48, 64).sign()
    lowbit.quantize_(model, make())
    weight = model[0].dequantize()
    assert weight.isfinite().all() and ((weight != 0).unflatten(1, (-1, 4)).sum(2) <= 2).all()
    y = model(torch.full((3, 64), 2.0**-40))
    assert y.isfinite().all()


@pytest.mark.parametrize("row", [row for row in ROWS if f"linear_{FORMAT}_int8_" not in row])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_inf_and_nan_meet_the_weights_that_are_0_too(row: str, value: float) -> None:
    packed = testing.pack_weight(torch.randn(17, 64), FORMAT)
    for m in (1, 2, 4, 20):
        case, x = LinearCase(m, 17, 64, "float32", FORMAT), torch.randn(m, 64)
        if not testing.serves(row, case):
            continue
        for column in range(4):
            bad = x.clone()
            bad[m - 1, column] = value
            y = forced(row, lambda bad=bad, case=case: torch.ops.lowbit.linear(bad, packed, *case.op_args))
            assert not y[m - 1].isfinite().any() and y[: m - 1].isfinite().all()


@pytest.mark.parametrize("make", CONFIGS)
def test_layers_compute_with_their_dequantized_weight_and_have_its_gradient(make: object) -> None:
    torch.manual_seed(0)
    model = linear()
    dense = model[0].weight.detach().clone()
    report = lowbit.sparsify_(model, make())
    layer = model[0]
    weight = layer.dequantize()
    assert torch.equal(weight != 0, prune(dense) != 0)
    noise = (dense - weight).double().square().sum()
    assert report.rows[0].error_db == pytest.approx(
        float(10 * (dense.double().square().sum() / noise).log10()), abs=0.01
    )
    x = torch.randn(2, 5, 64, requires_grad=True)
    y, grad = layer(x), torch.randn(2, 5, 48)
    y.backward(grad)
    step = 0.02 if "int8" in layer.spec.x_format else 1e-5
    assert (y - nn.functional.linear(x, weight, layer.bias)).abs().max() < step * y.abs().max()
    assert torch.allclose(x.grad, grad @ weight, atol=1e-4)


@pytest.mark.parametrize("make", CONFIGS)
@pytest.mark.parametrize("group_size", [None, 64])
def test_pruned_weights_are_taken_as_they_are_and_others_named(make: object, group_size: int | None) -> None:
    torch.manual_seed(0)
    model = linear()
    model[0].weight.data = prune(model[0].weight.data)
    wanted = model[0].weight.detach().clone()
    other = linear()
    other[0].weight.data = wanted.clone()
    other[0].weight.data[3, 8:12] = torch.tensor([1.0, 0.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"weight of 0 must be 2:4 for .*pruned=True\), got 3 of \[3, 8:12\] that"):
        lowbit.quantize_(other, make(group_size, pruned=True))
    assert type(other[0]) is nn.Linear
    lowbit.quantize_(model, make(group_size, pruned=True))
    assert (model[0].dequantize() - wanted).abs().max() <= wanted.abs().max() / 127.5
    assert torch.equal(model[0].dequantize(), lowbit_dequantized(wanted, make(group_size)))


def lowbit_dequantized(weight: Tensor, config: object) -> Tensor:
    model = linear(weight.shape[1], len(weight))
    model[0].weight.data = weight.clone()
    lowbit.quantize_(model, config)
    return model[0].dequantize()


def test_a_weight_takes_five_bits() -> None:
    spec, dense = (config().spec(torch.float32) for config in (lowbit.semi_sparse_weight, lowbit.int8_weight_only))
    scales = 4096 // 16 * 128
    assert spec.bytes(4096, 4096) - scales == (dense.bytes(4096, 4096) - scales) * 5 // 8


@pytest.mark.parametrize("make", CONFIGS)
def test_state_dicts_of_both_layouts_load_and_give_the_same_bits(make: object, tmp_path: Path) -> None:
    model, x = linear(100, 37), torch.randn(3, 100)
    lowbit.quantize_(model, make(32))
    for state in (model.state_dict(), lowbit.quant.repack(model.state_dict())):
        torch.save(state, tmp_path / "model.pt")
        other = linear(100, 37)
        lowbit.load(other, tmp_path / "model.pt")
        assert torch.equal(other(x), model(x)) and torch.equal(other[0].weight, model[0].weight)


def test_a_file_with_three_codes_in_a_four_is_refused() -> None:
    model = linear()
    lowbit.quantize_(model, lowbit.semi_sparse_weight())
    state = lowbit.quant.repack(model.state_dict())
    weight = state["0.weight"].clone()
    weight[5, 16 + 8 : 16 + 12] = torch.tensor([1, 2, 3, 128], dtype=torch.uint8)
    text = r"codes of int8_semi_sparse must be 2:4, got 3 of \[5, 8:12\] that are not 128"
    with pytest.raises(ValueError, match=text):
        model.load_state_dict(state | {"0.weight": weight})


def test_plain_codes_go_in_and_come_back_and_others_are_named() -> None:
    spec = LinearSpec(FORMAT, 32)
    codes, scale = semi_sparse_codes(33, 100), 2.0 ** torch.randint(-3, 4, (33, 4))
    layer = lowbit.QuantLinear.pack(codes, scale, None, spec)
    got, got_scale, _ = layer.unpack()
    assert torch.equal(got, codes) and torch.equal(got_scale, scale)
    codes[2, 4:8] = torch.tensor([128, 1, 2, 3], dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"pack: codes must be 2:4, got 3 of \[2, 4:8\] that are not 128"):
        lowbit.QuantLinear.pack(codes, scale, None, spec)


@pytest.mark.parametrize("make", CONFIGS)
def test_layers_are_built_on_meta_copied_compiled_and_made_float_again(make: object, tmp_path: Path) -> None:
    model, x = linear(100, 36), torch.randn(3, 100)
    lowbit.quantize_(model, make())
    y, weight = model(x), model[0].dequantize()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        empty = linear(100, 36)
    lowbit.quantize_(empty, make(pruned=True))
    empty.load_state_dict(torch.load(tmp_path / "model.pt"), assign=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for other in (empty, copy.deepcopy(model), compiled):
        assert torch.equal(other(x), y)
    lowbit.dequantize_(model)
    assert type(model[0]) is nn.Linear and torch.equal(model[0].weight, weight)


@pytest.mark.parametrize("make", CONFIGS)
def test_adapters_train_and_are_not_merged(make: object) -> None:
    peft = pytest.importorskip("peft")
    model = linear()
    lowbit.quantize_(model, make())
    packed = model[0].weight.clone()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], init_lora_weights=False))
    adapted(torch.randn(2, 64)).sum().backward()
    assert all(parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad)
    with pytest.raises(ValueError, match="merge: a weight must be dense to take an adapter, got a 2:4 weight; call lowbit.dequantize_"):
        adapted.merge_and_unload()
    assert torch.equal(adapted.base_model.model[0].base_layer.weight, packed)


def test_the_head_of_a_language_model_keeps_all_of_its_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 12)

        def get_output_embeddings(self) -> nn.Linear:
            return self.head

    for make, x_format in zip(CONFIGS, ("float", "int8_row"), strict=True):
        model = Model()
        lowbit.quantize_(model, make())
        assert model.body.spec.format == FORMAT
        assert (model.head.spec.format, model.head.spec.x_format) == ("int8", x_format)
        model = Model()
        lowbit.quantize_(model, make(), head=None)
        assert model.head.spec.format == FORMAT


@pytest.mark.parametrize("make", CONFIGS)
def test_what_cannot_be_is_named_and_nothing_changes(make: object) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    text = r"quantize_: weight of 1 must have in_features in fours for .*\(.*\), got in_features=6"
    with pytest.raises(ValueError, match=text):
        lowbit.quantize_(model, make())
    assert all(type(layer) is nn.Linear for layer in model)
    with pytest.raises(ValueError, match="k must be a multiple of 4 for a int8_semi_sparse weight.*got k=6"):
        testing.pack_weight(torch.randn(4, 6), FORMAT)
    with pytest.raises(ValueError, match="asymmetric must be false for a int8_semi_sparse weight"):
        testing.pack_weight(torch.randn(4, 8), FORMAT, 32, "asymmetric")
    with pytest.raises(ValueError, match="fake_quantize: format must not be 2:4, got int8_semi_sparse"):
        torch.ops.lowbit.fake_quantize(torch.randn(4, 8), *make().spec(torch.float32).fake_quantize_args)
    with pytest.raises(TypeError, match="pruned must be True or False, got pruned=1"):
        make(pruned=1)
    with pytest.raises(ValueError, match="group_size must be 32, .*got group_size=48"):
        make(48)
    tables = nn.Sequential(nn.Embedding(8, 8))
    with pytest.raises(ValueError, match="the format of the embedding 0 must not be 2:4"):
        lowbit.quantize_(tables, make(), lambda module, name: isinstance(module, nn.Embedding))


def test_sparsify_takes_semi_sparse_configurations_alone() -> None:
    for config, got in ((lowbit.int8_weight_only(), "Int8WeightOnlyConfig"), (lowbit.SemiSparseWeightConfig, "SemiSp")):
        with pytest.raises(TypeError, match=f"sparsify_: config must be a SemiSparseWeightConfig or a BlockSparseWeightConfig, got {got}"):
            lowbit.sparsify_(linear(), config)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16))
    lowbit.sparsify_(model, lowbit.SemiSparseWeightConfig(), lambda module, name: name == "1")
    assert type(model[0]) is nn.Linear and model[1].spec.format == FORMAT


@pytest.mark.parametrize("make", CONFIGS)
def test_configurations_are_read_back_from_their_text_and_spec(make: object) -> None:
    for config in (make(), make(64), make(None, scale="search"), make(pruned=True)):
        assert config_of(str(config)) == config
        assert config_of(config.spec(torch.float32)).spec(torch.float32) == config.spec(torch.float32)


def test_searched_scales_are_no_worse() -> None:
    torch.manual_seed(0)
    for group_size in (None, 32):
        reports = []
        for scale in ("absmax", "search"):
            torch.manual_seed(1)
            reports.append(lowbit.sparsify_(linear(256), lowbit.semi_sparse_weight(group_size, scale=scale)))
        absmax, searched = (report.rows[0].error_db for report in reports)
        assert searched >= absmax
