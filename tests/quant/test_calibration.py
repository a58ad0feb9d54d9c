# SPDX-License-Identifier: Apache-2.0
"""calibrate: the moments of what layers were given, any kind of batch, errors that name the layer; what quantize_ makes
of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit
from lowbit.quant.input_moments import InputMoments


class TwoInputs(nn.Module):
    """One layer that only `y` reaches, one that nothing does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(40, 9), nn.Linear(24, 9), nn.Linear(9, 9)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = self.first(x)
        return out if y is None else out + self.second(input=y)


def output_error(model: nn.Module, quantized: nn.Module, x: torch.Tensor) -> float:
    return float((model(x) - quantized(x)).square().mean())


def skewed(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    """Inputs of correlated channels, of which some are much larger."""
    generator = torch.Generator().manual_seed(7)
    mix = torch.randn(k, k, generator=generator) / k**0.5 * torch.logspace(-2, 1, k)[:, None] + 0.3 * torch.eye(k)
    sizes = torch.logspace(-1, 1, k)[torch.randperm(k, generator=generator)]
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)) @ mix * sizes


@pytest.mark.parametrize("batch", [lambda x, y: (x, y), lambda x, y: [x, y], lambda x, y: {"x": x, "y": y}])
def test_moments_are_those_of_all_rows_whatever_a_batch_is(batch):
    parts = [(torch.randn(3, 5, 40), torch.randn(3, 5, 24)) for _ in range(4)]
    calibration = lowbit.calibrate(TwoInputs(), [batch(x, y) for x, y in parts], hessian=True)
    for name, index in (("first", 0), ("second", 1)):
        rows = torch.cat([part[index].flatten(0, 1) for part in parts]).double()
        layer = calibration.layers[name]
        assert layer.rows == 60
        torch.testing.assert_close(layer.importance.double(), rows.square().mean(0), rtol=1e-5, atol=0)
        torch.testing.assert_close(layer.hessian.double(), rows.T @ rows / 60, rtol=1e-4, atol=1e-5)
    assert calibration.uncalled == ("never",)
    assert repr(calibration) == "Calibration(2 layers, 60 to 60 rows, with hessians, 1 never called)"


@pytest.mark.parametrize("masked", [False, True])
def test_the_layers_inside_of_torchs_encoder_are_seen(masked):
    """Whose fused inference passes them by, with padding even through nested tensors."""
    layer = nn.TransformerEncoderLayer(32, 4, 96, batch_first=True, dropout=0.0)
    encoder, x = nn.TransformerEncoder(layer, 2), torch.randn(3, 7, 32)
    batch = {"src": x, "src_key_padding_mask": torch.arange(7) >= torch.tensor([[7], [5], [3]])} if masked else x
    encoder.layers[1].eval()
    calibration = lowbit.calibrate(encoder, [batch])
    assert set(calibration.layers) == {f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
    assert all(layer.rows == 21 for layer in calibration.layers.values())
    assert encoder.use_nested_tensor and encoder.layers[0].activation_relu_or_gelu == 1
    assert encoder.training and encoder.layers[0].training and not encoder.layers[1].training


def test_a_tensor_is_the_one_argument_and_any_iterable_of_them_is_taken(subtests):
    x = torch.randn(2, 40)
    for batches in ([x, x], (x for _ in range(2)), torch.utils.data.DataLoader([x[0], x[1]], batch_size=1)):
        with subtests.test(type(batches).__name__):
            assert "first" in lowbit.calibrate(TwoInputs(), batches).layers
    assert lowbit.calibrate(TwoInputs(), [x], filter_fn=lambda module, name: name == "first").uncalled == ()


def test_the_model_is_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    seen = lowbit.calibrate(model, [torch.randn(4, 8)])
    assert [module.training for module in model] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model[0]._forward_pre_hooks and seen.layers["0"].rows == 4
    with pytest.raises(ValueError, match="got RuntimeError on batch 0"):
        lowbit.calibrate(model, [torch.randn(4, 9)])
    assert model.training and not model[0]._forward_pre_hooks


def test_it_saves_and_loads(tmp_path):
    calibration = lowbit.calibrate(TwoInputs(), [torch.randn(4, 40)], hessian=True)
    calibration.save(tmp_path / "calibration.pt")
    again = lowbit.Calibration.load(tmp_path / "calibration.pt")
    assert repr(again) == repr(calibration)
    for name, layer in calibration.layers.items():
        assert torch.equal(again.layers[name].importance, layer.importance)
        assert torch.equal(again.layers[name].hessian, layer.hessian)
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"Calibration.load: .*other.pt must be a calibration of version 1, got None"):
        lowbit.Calibration.load(tmp_path / "other.pt")


@pytest.mark.parametrize(
    ("batches", "kind", "text"),
    [
        (torch.randn(4, 40), TypeError, r"calibrate: batches must be an iterable of inputs, got Tensor; \[x\] is one"),
        ({"x": torch.randn(4, 40)}, TypeError, "calibrate: batches must be an iterable of inputs, got dict"),
        (3, TypeError, "calibrate: batches must be an iterable of inputs, got int"),
        ([], ValueError, "calibrate: batches must reach a linear layer, got 0 batches that called none of 3"),
        ([torch.full((2, 40), torch.nan)], ValueError, "calibrate: inputs of first must be finite, got inf or nan"),
    ],
)
def test_bad_batches_are_refused(batches, kind, text):
    with pytest.raises(kind, match=text):
        lowbit.calibrate(TwoInputs(), batches)


def test_what_quantize_cannot_use_is_refused_before_anything_changes(subtests):
    model = TwoInputs()
    seen = lowbit.calibrate(model, [torch.randn(4, 40)])
    cases = [
        (lowbit.int4_weight_only(32), seen, "calibration must have inputs of every layer, got none of second, never"),
        (lowbit.int8_weight_only(), seen, "calibration must be None for formats that neither search for scales nor use GPTQ, got int8_weight"),
        (lowbit.int4_weight_only(32, algorithm=lowbit.HQQ()), seen, "calibration must be None for formats that neither search"),
        (lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ()), None, "calibration must be batches, or a result of lowbit.calibrate"),
    ]
    for config, calibration, text in cases:
        with subtests.test(text), pytest.raises(ValueError, match=f"quantize_: {text}"):
            lowbit.quantize_(model, config, calibration=calibration)
    only_first = lambda module, name: name == "first"  # noqa: E731
    with pytest.raises(ValueError, match=r"quantize_: GPTQ needs lowbit.calibrate\(\.\.\., hessian=True\)"):
        lowbit.quantize_(model, lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ()), only_first, calibration=seen)
    with pytest.raises(TypeError, match="quantize_: calibration must be a result of lowbit.calibrate, an iterable of batches .*, got dict; .x. is one"):
        lowbit.quantize_(model, lowbit.int4_weight_only(32), only_first, calibration={})
    other = nn.ModuleDict({"first": nn.Linear(41, 8)})
    with pytest.raises(ValueError, match="quantize_: calibration of first must be of k=41, got 40"):
        lowbit.quantize_(other, lowbit.int4_weight_only(32), calibration=seen)
    for value in (-1.0, torch.inf, torch.nan):
        with subtests.test(value=value):
            spoilt = copy.deepcopy(seen)
            spoilt.layers["first"].squares[3] = value
            with pytest.raises(ValueError, match="calibration of first must be of squares that are finite and not negative"):
                lowbit.quantize_(model, lowbit.int4_weight_only(32), only_first, calibration=spoilt)
    spoilt = lowbit.calibrate(model, [torch.randn(4, 40)], hessian=True)
    spoilt.layers["first"].products[3, 5] = torch.nan
    with pytest.raises(ValueError, match="calibration of first must be of finite products, got inf or nan"):
        lowbit.quantize_(model, lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ()), only_first, calibration=spoilt)
    assert not any(isinstance(module, lowbit.QuantLinear) for module in model.modules())


@pytest.mark.parametrize("mapping", [lowbit.MappingType.SYMMETRIC, lowbit.MappingType.ASYMMETRIC])
@pytest.mark.parametrize("group_size", [32, 128, None])
def test_each_step_brings_the_output_nearer(mapping, group_size):
    """Plain rounding, searched scales, scales for these inputs, GPTQ; measured on other inputs of the same kind."""
    model = nn.Sequential(nn.Linear(192, 64, bias=False))
    batches, x = [skewed(400, 192)], skewed(400, 192, 1)
    calibration = lowbit.calibrate(model, batches, hessian=True)
    found = []
    for options, given in (
        ({"scale": "absmax"}, None), ({}, None), ({}, calibration), ({"algorithm": lowbit.GPTQ()}, calibration),
    ):  # fmt: skip
        quantized = copy.deepcopy(model)
        config = lowbit.int4_weight_only(group_size, mapping_type=mapping, **options)
        report = lowbit.quantize_(quantized, config, calibration=given)
        row = report.quantized[0]
        found.append(output_error(model, quantized, x))
        assert (row.absmax_db != row.absmax_db) == (options.get("scale") == "absmax") and row.error_db > 10
        assert options.get("scale") == "absmax" or row.error_db > row.absmax_db
    absmax, searched, calibrated, gptq = found
    assert searched < absmax and calibrated < searched and gptq < 0.7 * calibrated, found


def test_layers_that_share_a_weight_share_what_was_seen(tied):
    model = tied()
    calibration = lowbit.calibrate(model, [torch.randn(6, 50)])
    both = calibration.layers["0"] + calibration.layers["1"]
    assert both.rows == 12
    again = copy.deepcopy(calibration)
    again.layers = {name: both for name in again.layers}
    twin = copy.deepcopy(model)
    lowbit.quantize_(model, lowbit.int4_weight_only(32), calibration=calibration)
    lowbit.quantize_(twin, lowbit.int4_weight_only(32), calibration=again)
    assert torch.equal(model[0].weight, twin[0].weight)


@pytest.mark.parametrize("config", [lowbit.int4_weight_only(32), lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ())])
def test_batches_are_calibrated_with_inside_of_quantize(config):
    batches = [skewed(40, 64, seed) for seed in range(3)]
    given, made = (nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)) for _ in range(2))
    made.load_state_dict(given.state_dict())
    hessian = config.algorithm is not None
    lowbit.quantize_(given, config, calibration=lowbit.calibrate(given, batches, hessian=hessian))
    lowbit.quantize_(made, config, calibration=iter(batches))
    assert all(torch.equal(a, b) for a, b in zip(given.state_dict().values(), made.state_dict().values(), strict=True))
    assert made.training and not any(module._forward_pre_hooks for module in made)


@pytest.mark.parametrize(
    ("calibration", "error", "text"),
    [
        (torch.randn(4, 64), TypeError, r"calibration must be a result of lowbit.calibrate, an iterable of batches .* got Tensor; \[x\] is one"),
        (7, TypeError, "an iterable of batches to run the model on, or 'self', got int"),
        ("batches", TypeError, "got str"),
        ([], ValueError, "batches must reach a linear layer, got 0 batches"),
        ([torch.randn(4, 64), torch.randn(4, 63)], ValueError, r"got RuntimeError on batch 1, which is model\(float32 \[4, 63\]\): mat1"),
        ([(torch.randn(4, 64), torch.tensor([1]))], ValueError, r"TypeError on batch 0, which is model\(float32 \[4, 64\], int64 \[1\]\): .*takes"),
        ([{"ids": torch.randn(4, 64)}], ValueError, r"batch 0, which is model\(ids=float32 \[4, 64\]\): .*unexpected keyword"),
        ([torch.full((4, 64), torch.inf)], ValueError, "inputs of 0 must be finite"),
    ],
)
def test_a_wrong_batch_is_named_and_nothing_is_changed(calibration, error, text):
    model = nn.Sequential(nn.Linear(64, 8))
    with pytest.raises(error, match=text):
        lowbit.quantize_(model, lowbit.int4_weight_only(32), calibration=calibration)
    assert type(model[0]) is nn.Linear and model.training and not model[0]._forward_pre_hooks


def test_batches_that_the_format_has_no_use_for_are_refused_before_they_are_run():
    def batches():
        raise AssertionError("was run")
        yield

    with pytest.raises(ValueError, match="calibration must be None for formats that neither search for scales nor use GPTQ, got int8_weight_only"):
        lowbit.quantize_(nn.Sequential(nn.Linear(64, 8)), lowbit.int8_weight_only(), calibration=batches())


class Projections(nn.Module):
    """Three layers, of which two have the same input, unless it is changed in between or `apart` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(40, 24, bias=False), nn.Linear(40, 9, bias=False), nn.Linear(24, 9, bias=False)

    def forward(self, x: torch.Tensor, changed: bool = False, apart: bool = False) -> torch.Tensor:
        q = self.q(x)
        if apart:
            return self.out(q)
        return self.k(x.mul_(2) if changed else x).sum() + self.out(q)


def test_layers_with_the_same_input_share_its_moments_unless_it_changed(tmp_path):
    parts = [torch.randn(30, 40) for _ in range(3)]
    model, x = Projections(), torch.cat(parts).double()
    seen = lowbit.calibrate(model, parts, hessian=True)
    assert seen.layers["q"] is seen.layers["k"] and seen.layers["q"] is not seen.layers["out"]
    seen.save(tmp_path / "seen.pt")
    again = lowbit.Calibration.load(tmp_path / "seen.pt")
    assert again.layers["q"].products is again.layers["k"].products
    torch.testing.assert_close(seen.layers["q"].hessian.double(), x.T @ x / 90, rtol=1e-4, atol=1e-5)

    batches = [(parts[0].clone(), True), (parts[1], False), (parts[2], False, True)]
    seen = lowbit.calibrate(model, batches, hessian=True)
    assert seen.layers["q"].rows == 90 and seen.layers["k"].rows == 60
    y = torch.cat([2 * parts[0], parts[1]]).double()
    torch.testing.assert_close(seen.layers["q"].hessian.double(), x.T @ x / 90, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.layers["k"].hessian.double(), y.T @ y / 60, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_inference_tensors_which_do_not_tell_changes_are_not_shared():
    x = torch.randn(30, 40)
    wanted = x.double().clone()
    seen = lowbit.calibrate(Projections(), [(x, True)], hessian=True)
    for name, rows in (("q", wanted), ("k", 2 * wanted)):
        torch.testing.assert_close(seen.layers[name].hessian.double(), rows.T @ rows / 30, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mapping", [lowbit.MappingType.SYMMETRIC, lowbit.MappingType.ASYMMETRIC])
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_of_layers_with_the_same_input_finds_the_codes_of_each_alone(mapping, act_order):
    model, batches = Projections(), [skewed(200, 40)]
    config = lowbit.int4_weight_only(32, mapping_type=mapping, algorithm=lowbit.GPTQ(act_order=act_order))
    together, alone = copy.deepcopy(model), copy.deepcopy(model)
    report = lowbit.quantize_(together, config, calibration=batches)
    seen = lowbit.calibrate(model, batches, hessian=True)
    seen.layers = {name: copy.deepcopy(layer) for name, layer in seen.layers.items()}
    for name in ("k", "out", "q"):
        one = lowbit.quantize_(alone, config, lambda module, found, name=name: found == name, calibration=seen)
        assert report.layers[name].error_db == pytest.approx(one.layers[name].error_db, abs=0.1)
        a, b = together.get_submodule(name).dequantize(), alone.get_submodule(name).dequantize()
        assert (a != b).double().mean() < 0.05  # sums of another order may round a tie to the other side


@pytest.mark.parametrize("k", [24, 300])
def test_rows_that_are_kept_and_rows_that_are_summed_give_the_same_products(k):
    """300 channels keep all of these rows, 24 none."""
    parts = [torch.randn(25, k) for _ in range(4)]
    moments, halves = InputMoments.zero(k, True), [InputMoments.zero(k, True) for _ in range(2)]
    for number, part in enumerate(parts):
        moments.add(part)
        halves[number % 2].add(part)
        part_before = part.clone()
        part.zero_()  # the caller's tensor is free to change
        parts[number] = part_before
    x = torch.cat(parts).double()
    for found in (moments, halves[0] + halves[1]):
        assert found.rows == 100 and found.has_products and found.products_are_finite
        torch.testing.assert_close(found.hessian.double(), x.T @ x / 100, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.products.double(), x.T @ x, rtol=1e-4, atol=1e-3)
    assert torch.equal(moments.hessian, moments.hessian.T) and moments.products is moments.products
    order = torch.randperm(k)
    torch.testing.assert_close(moments.in_order(order).products, moments.products[order][:, order])
