# SPDX-License-Identifier: Apache-2.0
"""Calibration of experts: what each one multiplies by, counted beside float64, and what quantize_ makes of it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from expert_modules import CLASSES, HIDDEN, PICKED, E, Experts, made, routed
from torch import Tensor, nn

import lowbit
from lowbit.quant.calibration import FEW_ROWS
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.kinds import weights_of
from lowbit.quant.packing import pack_weight

INT4 = lowbit.int4_weight_only(group_size=32)


class Routed(nn.Module):
    """A linear layer and experts behind it, by name `parts.experts`, with the routes of `routed`."""

    def __init__(self, experts: Experts, index: Tensor) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleDict({"linear": nn.Linear(HIDDEN, HIDDEN), "experts": experts})
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.full(self.index.shape, 1 / PICKED)
        return self.parts["experts"](self.parts["linear"](x), top_k_weights=weights, top_k_index=self.index)


def skewed(rows: int) -> Tensor:
    return torch.randn(rows, HIDDEN) * torch.logspace(-1, 1, HIDDEN)[torch.randperm(HIDDEN)]


def blended(moments: list[InputMoments]) -> list[Tensor]:
    """The importance of each expert: its rows, and FEW_ROWS average ones of the layer."""
    rows, squares = sum(one.rows for one in moments), sum(one.squares for one in moments)
    return [((one.squares + squares * FEW_ROWS / rows) / (one.rows + FEW_ROWS)).float() for one in moments]


@pytest.mark.parametrize("hessian", [False, True])
@pytest.mark.parametrize("cls", CLASSES)
@torch.no_grad()
def test_moments_are_those_of_the_rows_of_each_expert(cls: type[Experts], hessian: bool) -> None:
    x, index, _ = routed()
    index[::3, 1], index[5] = E, E  # pairs of no expert
    model = Routed(made(cls, bias=True), index)
    calibration = lowbit.calibrate(model, [x, 2 * x], hessian=hessian)
    experts = model.parts["experts"]
    first, down = (f"parts.experts.{weight.key}" for weight in weights_of(experts))
    exact = copy.deepcopy(experts).double()
    for expert in range(E):
        token = (index == expert).nonzero()[:, 0]
        rows = torch.cat([model.parts["linear"](batch)[token] for batch in (x, 2 * x)]).double()
        hidden = exact.product(first.rpartition(".")[2], rows, expert)
        hidden = exact._apply_gate(hidden) if cls.gated else exact.act_fn(hidden)
        for name, wanted in ((first, rows), (down, hidden)):
            moments = calibration.experts[name][expert]
            assert moments.rows == len(wanted) == 2 * int((index == expert).sum()) and moments.has_products == hessian
            torch.testing.assert_close(moments.squares, wanted.square().sum(0), rtol=1e-4, atol=1e-9)
            if hessian:
                torch.testing.assert_close(moments.hessian.double(), wanted.T @ wanted / max(len(wanted), 1), rtol=1e-4, atol=1e-5)
    assert [*calibration.layers] == ["parts.linear"] and not calibration.uncalled
    assert f"experts of 2 weights, 0 to 48 rows{', with hessians' * hessian})" in repr(calibration)


def test_each_expert_is_packed_by_its_own_inputs_and_a_few_rows_of_the_layer() -> None:
    x, index, _ = routed()
    model = Routed(made(), index)  # the last expert has no tokens
    calibration = lowbit.calibrate(model, [x])
    before = copy.deepcopy(model.parts["experts"])
    lowbit.quantize_(model, INT4, calibration=calibration)
    spec = INT4.spec(torch.float32)
    for weight in weights_of(before):
        moments = calibration.experts[f"parts.experts.{weight.key}"]
        assert moments[E - 1].rows == 0
        for expert, importance in enumerate(blended(moments)):
            inputs = InputMoments(1, importance.double())
            wanted, _ = pack_weight(weight.matrix(before._parameters[weight.key].detach())[expert], spec, inputs)
            assert torch.equal(getattr(model.parts["experts"], weight.key)[expert], wanted)


@torch.no_grad()
def test_it_lowers_the_error_of_the_result() -> None:
    x, index, _ = routed()
    batches = [skewed(len(x)) for _ in range(4)]
    model = Routed(made(), index)
    model.parts["linear"] = nn.Identity()
    errors = []
    for calibration in (None, batches):
        packed = copy.deepcopy(model)
        report = lowbit.quantize_(packed, INT4, calibration=calibration)
        errors.append(sum(float((model(batch) - packed(batch)).square().sum()) for batch in batches))
        assert len(report.quantized) == 2
    assert errors[1] < 0.9 * errors[0]


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    x, index, _ = routed()
    model = Routed(made(), index)
    calibration = lowbit.calibrate(model, [x], hessian=True)
    calibration.save(tmp_path / "calibration.pt")
    again = lowbit.Calibration.load(tmp_path / "calibration.pt")
    assert repr(again) == repr(calibration) and again.experts.keys() == calibration.experts.keys()
    for name, moments in calibration.experts.items():
        for one, other in zip(moments, again.experts[name], strict=True):
            assert torch.equal(one.squares, other.squares) and torch.equal(one.hessian, other.hessian)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    lowbit.quantize_(first, INT4, calibration=calibration)
    lowbit.quantize_(second, INT4, calibration=again)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key])


def test_what_it_has_not_seen_is_named_before_anything_changes() -> None:
    x, index, _ = routed()
    model = Routed(made(), torch.full_like(index, E))
    calibration = lowbit.calibrate(model, [x])
    assert calibration.uncalled == ("parts.experts",)
    with pytest.raises(ValueError, match=r"must have inputs of every layer, got none of parts\.experts\.gate_up_proj, parts\.experts\.down_proj"):
        lowbit.quantize_(model, INT4, calibration=calibration)
    calibration = lowbit.calibrate(Routed(made(), index), [x])
    calibration.experts["parts.experts.down_proj"].pop()
    with pytest.raises(ValueError, match=r"calibration of parts\.experts\.down_proj must be of 5 experts, got 4"):
        lowbit.quantize_(model, INT4, calibration=calibration)
    assert type(model.parts["experts"]) is Experts and type(model.parts["linear"]) is nn.Linear


GPTQ = lowbit.int4_weight_only(group_size=32, algorithm=lowbit.GPTQ())


def hessian_of(rows: Tensor, layer: Tensor) -> Tensor:
    """Of an expert: its rows, and FEW_ROWS average rows of the layer."""
    rows, layer = rows.double(), layer.double()
    return (rows.T @ rows + layer.T @ layer * FEW_ROWS / len(layer)) / (len(rows) + FEW_ROWS)


@torch.no_grad()
def test_gptq_packs_each_expert_by_its_own_inputs_and_a_few_rows_of_the_layer() -> None:
    x, index, _ = routed()
    index[5] = E  # no expert
    model = Routed(made(), index)
    before, linear = copy.deepcopy(model.parts["experts"]), copy.deepcopy(model.parts["linear"])
    report = lowbit.quantize_(model, GPTQ, calibration=[x, -3 * x])
    spec = GPTQ.spec(torch.float32)
    hidden = torch.cat([linear(batch) for batch in (x, -3 * x)])
    routes = torch.cat([index, index])
    rows = [hidden[(routes == expert).nonzero()[:, 0]] for expert in range(E)]
    for weight in weights_of(before):
        layer = torch.cat(rows)
        for expert in range(E):
            hessian = hessian_of(rows[expert], layer)
            inputs = InputMoments(1, hessian.diagonal(), hessian.float())
            wanted, _ = pack_weight(weight.matrix(before._parameters[weight.key])[expert], spec, inputs)
            found = getattr(model.parts["experts"], weight.key)[expert]
            assert (found != wanted).double().mean() < 0.02  # sums of another order may round a tie to the other side
        if weight.key == "gate_up_proj":
            rows = [before._apply_gate(before.product(weight.key, of, expert)) for expert, of in enumerate(rows)]
    notes = [row.note for row in report.quantized if "experts" in row.layer]
    assert notes == [f"1 of {E} experts saw no token and took the inputs of all"] * 2


@torch.no_grad()
def test_gptq_lowers_the_error_of_the_result_on_other_inputs() -> None:
    torch.manual_seed(0)
    mix = torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5 * torch.logspace(-2, 1, HIDDEN)[:, None]
    index = torch.randint(0, E, (400, PICKED))
    model = Routed(made(), index)
    model.parts["linear"] = nn.Identity()
    seen, others = ([torch.randn(400, HIDDEN) @ mix for _ in range(2)] for _ in range(2))
    errors = []
    for config in (INT4, GPTQ):
        packed = copy.deepcopy(model)
        lowbit.quantize_(packed, config, calibration=seen)
        errors.append(sum(float((model(batch) - packed(batch)).square().sum()) for batch in others))
    assert errors[1] < 0.7 * errors[0], errors


def test_rows_are_kept_once_for_all_experts_and_their_products_are_made_one_at_a_time() -> None:
    x, index, _ = routed()
    model = Routed(made(), index)
    calibration = lowbit.calibrate(model, [x], hessian=True)
    for name, count in (("gate_up_proj", len(x)), ("down_proj", index.numel())):
        moments = calibration.experts[f"parts.experts.{name}"]
        kept = {id(rows): rows for one in moments for rows, _ in one.stored_rows[3]}
        assert [len(rows) for rows in kept.values()] == [count]
        assert all(one.stored_rows[2] is None for one in moments)
    lowbit.quantize_(model, GPTQ, calibration=calibration)
    assert all(one.stored_rows[2] is None for one in calibration.experts["parts.experts.gate_up_proj"])


def test_moments_of_a_layer_count_a_row_of_several_experts_as_often() -> None:
    x = torch.randn(50, 70)
    picked = [torch.randint(0, 50, (count,)) for count in (5, 200, 0, 60)]  # the second is summed at once
    each = [InputMoments.zero(70, True) for _ in picked]
    for moments, of in zip(each, picked, strict=True):
        moments.add(x, of)
    rows = x[torch.cat(picked)].double()
    total = InputMoments.total(each)
    assert total.rows == len(rows)
    torch.testing.assert_close(total.squares, rows.square().sum(0))
    torch.testing.assert_close(total.products.double(), rows.T @ rows, rtol=1e-5, atol=1e-4)


def test_the_memory_of_many_inputs_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, index, _ = routed()
    model, batches = Routed(made(), index), [x, x]
    lowbit.calibrate(model, batches, hessian=True)
    assert not capsys.readouterr().err
    monkeypatch.setattr("lowbit.quant.calibration_cost.TOLD_FROM_BYTES", 1000)
    lowbit.calibrate(model, iter(batches), hessian=True)  # whose number is unknown
    assert not capsys.readouterr().err
    lowbit.calibrate(model, batches, hessian=True)
    assert "calibrate: the inputs of the layers take about 0.0 GB beside the model" in capsys.readouterr().err
