# SPDX-License-Identifier: Apache-2.0
"""autoquant with a calibration: codes are chosen with it, while formats are measured and when a plan is applied."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import lowbit
from lowbit.autotune.plan_row import PlanRow

W4, INT8 = lowbit.int4_weight_only(32), lowbit.int8_weight_only()
W4_GPTQ = lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ())
SECONDS = {"int4": 1.0, "int8": 4.0}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 32)).eval()


@pytest.fixture
def batches() -> list[torch.Tensor]:
    """Inputs of which four columns are large, so that weighting by them changes codes."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(96, 64, generator=generator) * torch.tensor([30.0] * 4 + [1.0] * 60) for _ in range(4)]


def by_name(plan: lowbit.Plan) -> dict[str, PlanRow]:
    return {row.layer: row for row in plan.rows}


def packed(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if value.dtype == torch.uint8}


@pytest.mark.parametrize("config", [W4, W4_GPTQ])
@pytest.mark.parametrize("ready", [False, True])
def test_the_codes_are_those_of_quantize_with_the_same_calibration(config, ready, model, batches, make_plan):
    given = lowbit.calibrate(model, batches, hessian=True) if ready else batches
    plan = make_plan(model, batches[0], [config], SECONDS, -100.0, calibration=given)
    wanted, got = copy.deepcopy(model), copy.deepcopy(model)
    lowbit.quantize_(wanted, config, calibration=batches)
    plan.apply(got)
    assert len(plan.specs) == 3 and "calibrated on the given inputs" in plan.notes
    assert packed(wanted).keys() == packed(got).keys() and all(map(torch.equal, packed(wanted).values(), packed(got).values()))


def test_errors_are_those_of_the_calibrated_codes(model, batches, make_plan):
    found = {
        name: by_name(make_plan(model, batches[0], [config], SECONDS, -100.0, calibration=given))["0"].error_db
        for name, config, given in (("none", W4, None), ("weighted", W4, batches), ("gptq", W4_GPTQ, batches))
    }
    assert found["none"] < found["weighted"] < found["gptq"]
    report = lowbit.quantize_(copy.deepcopy(model), W4_GPTQ, calibration=batches)
    assert report.rows[0].error_db == pytest.approx(found["gptq"], abs=1.0), "of 64 rows, and of the moments of all"


def test_a_bound_that_only_calibrated_codes_hold_lets_layers_have_4_bits(model, batches, make_plan):
    bound = 24.0
    plain = make_plan(model, batches[0], [W4], SECONDS, bound)
    calibrated = make_plan(model, batches[0], [W4_GPTQ], SECONDS, bound, calibration=batches)
    assert len(calibrated.specs) > len(plain.specs)
    changed = copy.deepcopy(model)
    calibrated.apply(changed)
    wanted, got = model(batches[0]).double(), changed(batches[0]).double()
    db = 10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum())
    assert db.item() == pytest.approx(calibrated.model_db, abs=1e-6) and db >= bound


def test_formats_with_scales_by_range_need_no_inputs_of_the_layer(model, batches, make_plan):
    """Of int8 with one scale by row, quantize_ refuses a calibration; in a plan other layers have a use for it."""
    plan = make_plan(model, batches[0], [INT8, W4], {"int8": 1.0, "int4": 2.0}, -100.0, calibration=batches)
    changed = copy.deepcopy(model)
    plan.apply(changed)
    assert {spec.format for spec in plan.specs.values()} == {"int8"}


def test_a_file_needs_the_calibration_again(model, batches, make_plan, tmp_path):
    plan = make_plan(model, batches[0], [W4_GPTQ], SECONDS, -100.0, calibration=batches)
    plan.save(tmp_path / "plan.json")
    loaded = lowbit.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.calibrated and loaded.specs["0"].algorithm == lowbit.GPTQ()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="Plan: calibration must be given, since the plan was made with one"):
        loaded.apply(model)
    with pytest.raises(ValueError, match="calibration must have inputs of every layer, got none of 2, 4"):
        loaded.apply(model, calibration=lowbit.calibrate(model, batches, lambda module, name: name == "0", hessian=True))
    assert all(map(torch.equal, before.values(), model.state_dict().values())), "nothing has changed"
    applied, wanted = copy.deepcopy(model), copy.deepcopy(model)
    loaded.apply(applied, calibration=iter(batches))
    plan.apply(wanted)
    assert all(map(torch.equal, packed(applied).values(), packed(wanted).values()))


def test_other_algorithms_are_kept_in_a_file(model, batches, make_plan, tmp_path):
    plan = make_plan(model, batches[0], [lowbit.int4_weight_only(32, algorithm=lowbit.HQQ(iterations=3))], SECONDS, -100.0)
    plan.save(tmp_path / "plan.json")
    assert lowbit.Plan.load(tmp_path / "plan.json") == plan and not plan.calibrated
    text = (tmp_path / "plan.json").read_text().replace("HQQ(iterations=3", "HQQ(iterations=0")
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="plan.json: 0: .*iterations must be an int of at least 1"):
        lowbit.Plan.load(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text(text.replace("HQQ(iterations=0", "AWQ(iterations=0"))
    with pytest.raises(ValueError, match="plan.json: 0: algorithm must be the text of GPTQ"):
        lowbit.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"calibration": 3}, TypeError, "calibration must be a result of lowbit.calibrate, an iterable of batches"),
        ({"calibration": "self"}, ValueError, "is no model of transformers that takes input_ids, and needs data"),
        ({"calibration": [], "candidates": [INT8]}, ValueError, "calibration must be None for formats that neither search"),
        ({"calibration": []}, ValueError, "batches must reach a linear layer, got 0 batches"),
        ({"tokenizer": str}, ValueError, "autoquant: tokenizer must be None without calibration=texts"),
    ],
)
def test_what_can_be_no_calibration_is_named(arguments, error, text, model, batches):
    with pytest.raises(error, match=text):
        lowbit.autoquant(model, batches[0], **{"candidates": [W4], "cache": False, **arguments})
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_layer_that_the_calibration_did_not_reach_is_named(model, batches):
    part = lowbit.calibrate(model, batches, lambda module, name: name != "2")
    with pytest.raises(ValueError, match="calibration must have inputs of every layer, got none of 2"):
        lowbit.autoquant(model, batches[0], candidates=[W4], calibration=part, cache=False)


def test_a_plan_without_one_takes_none(model, batches, make_plan):
    plan = make_plan(model, batches[0], [W4], SECONDS, -100.0)
    with pytest.raises(ValueError, match="Plan: calibration must be None for a plan that was made without one"):
        plan.apply(model, calibration=batches)
    with pytest.raises(ValueError, match="Plan: tokenizer must be None for a plan that was made without a calibration"):
        plan.apply(model, tokenizer=str)
    assert all(type(module) is nn.Linear for module in (model[0], model[2], model[4]))


def test_layers_that_share_a_weight_are_weighted_by_the_inputs_of_all(batches, make_plan):
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.other.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(x).tanh())

    torch.manual_seed(0)
    model = Shared().eval()
    plan = make_plan(model, batches[0], [W4_GPTQ], SECONDS, -100.0, calibration=batches)
    wanted, got = copy.deepcopy(model), copy.deepcopy(model)
    lowbit.quantize_(wanted, W4_GPTQ, calibration=batches)
    plan.apply(got)
    assert torch.equal(wanted.one.weight, got.one.weight) and got.one.weight is got.other.weight
    assert dataclasses.replace(plan) == plan
