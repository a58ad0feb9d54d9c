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


@pytest.mark.parametrize("cls", CLASSES)
@torch.no_grad()
def test_moments_are_those_of_the_rows_of_each_expert(cls: type[Experts]) -> None:
    x, index, _ = routed()
    index[::3, 1], index[5] = E, E  # pairs of no expert
    model = Routed(made(cls, bias=True), index)
    calibration = lowbit.calibrate(model, [x, 2 * x])
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
            assert moments.rows == len(wanted) == 2 * int((index == expert).sum()) and moments.products is None
            torch.testing.assert_close(moments.squares, wanted.square().sum(0), rtol=1e-4, atol=1e-9)
    assert [*calibration.layers] == ["parts.linear"] and not calibration.uncalled
    assert "experts of 2 weights, 0 to " in repr(calibration)


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
        assert all(torch.equal(a.squares, b.squares) for a, b in zip(moments, again.experts[name], strict=True))
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


def test_gptq_leaves_them_float() -> None:
    x, index, _ = routed()
    model = Routed(made(), index)
    report = lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32, algorithm=lowbit.GPTQ()), calibration=[x])
    (row,) = report.skipped
    assert row.note == "GPTQ needs x x^T of its inputs, which calibrate does not keep of a module of experts"
