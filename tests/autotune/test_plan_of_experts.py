# SPDX-License-Identifier: Apache-2.0
"""autoquant measures modules of experts as a kind of layer of their own, and a plan packs them."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.autotune import seen_layers
from lowbit.autotune.seen_layer import Shape
from lowbit.ops.packed_weights import were_replaced

E, HIDDEN, INNER, PICKED = 6, 64, 32, 2
INT8, W4A8 = lowbit.int8_weight_only(), lowbit.int8_dynamic_activation_int4_weight(32)


class Experts(nn.Module):
    def __init__(self, dtype: torch.dtype, *, scale: float = 1.0) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * INNER, HIDDEN, dtype=dtype) * HIDDEN**-0.5)
        self.down_proj = nn.Parameter(torch.randn(E, HIDDEN, INNER, dtype=dtype) * INNER**-0.5)
        self.scale = scale

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,enh->ten", hidden_states, self.gate_up_proj).chunk(2, -1)
        each = torch.einsum("tei,ehi->teh", self.act_fn(gate) * up * self.scale, self.down_proj)
        picked = each.gather(1, top_k_index[..., None].expand(-1, -1, HIDDEN))
        return (picked * top_k_weights[..., None].to(picked.dtype)).sum(1)


class Mixture(nn.Module):
    """A linear layer, a router, and experts."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.experts = nn.Linear(HIDDEN, HIDDEN, dtype=dtype), Experts(dtype, **options)
        self.router = nn.Parameter(torch.randn(E, HIDDEN, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x).reshape(-1, HIDDEN)
        weights, index = (hidden @ self.router.T).float().softmax(-1).topk(PICKED)
        return self.experts(hidden, index, weights).reshape(x.shape)


def of(plan: lowbit.Plan):
    return {row.layer: row for row in plan.rows}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_measured_listed_and_packed(dtype, x, make_plan, tmp_path):
    model, x = Mixture(dtype).eval(), x.to(dtype)
    wanted = model(x)
    before = dict(model.named_parameters())
    plan = make_plan(model, x, [INT8, W4A8], {"int4": 2.0, "int8": 4.0}, 30.0)
    row = of(plan)["experts"]
    assert row.shape == (E, 2 * INNER, HIDDEN) and row.calls == ((20, str(dtype)[6:], 1),) and row.row == ""
    assert row.spec.format == "int8" and (row.float_seconds, row.seconds) == (10.0, 4.0) and row.error_db >= 30
    assert row.bytes_before == model.experts.gate_up_proj.nbytes + model.experts.down_proj.nbytes
    assert "6 x 64 x 64" in repr(plan) and "2 of 2 layers quantized" in repr(plan)
    assert [bar.get_height() for bar in plan.plot()[0].patches] == [10_000.0, 10_000.0, 4_000.0, 4_000.0], "ms"
    assert torch.equal(model(x), wanted) and dict(model.named_parameters()) == before
    assert not were_replaced(list(before.values())), "an optimizer may still train the float model"
    plan.save(tmp_path / "plan.json")
    again = lowbit.Plan.load(tmp_path / "plan.json")
    assert again == plan
    report = again.apply(model)
    experts = model.experts
    assert isinstance(experts, lowbit.QuantExperts) and {spec.spec.format for spec in experts.stored.values()} == {
        "int8"
    }
    assert sum(item.bytes_after for item in report.quantized if "experts" in item.layer) == row.bytes_after
    noise = (model(x).double() - wanted.double()).square().sum()
    assert plan.model_db == pytest.approx(10 * math.log10(wanted.double().square().sum() / noise), abs=0.5)


def test_the_error_is_that_of_the_experts_that_the_router_chose(x, make_plan):
    model = Mixture().eval()
    plan = make_plan(model, x, [W4A8], {"int4": 2.0}, -math.inf, filter_fn=lambda module, name: name == "experts")
    hidden = model.before(x).reshape(-1, HIDDEN)
    weights, index = (hidden @ model.router.T).softmax(-1).topk(PICKED)
    exact = copy.deepcopy(model.experts).double()(hidden.double(), index, weights.double())
    lowbit.quantize_(model.experts, W4A8)
    noise = (model.experts(hidden, index, weights).double() - exact).square().sum()
    wanted = 10 * math.log10(exact.square().sum() / noise)
    assert of(plan)["experts"].error_db == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("picked", [1, 2, E])
def test_timed_calls_have_experts_drawn_uniformly(picked):
    experts = Mixture().experts
    (seen,) = seen_layers.seen_layers({"experts": experts})
    index = torch.zeros(3, picked, dtype=torch.int32)
    seen.note((torch.randn(3, HIDDEN), index, torch.ones(3, picked)), {})
    (shape,) = seen.calls
    assert shape == Shape(3, "float32", picked)
    x, index, weights = seen.arguments(Shape(3000, "float32", picked))
    assert x.shape == (3000, HIDDEN) and index.shape == weights.shape == (3000, picked) and index.dtype == torch.int32
    assert all(len(set(row)) == picked for row in index.tolist()), "no expert twice"
    counts = Counter(index.flatten().tolist())
    assert set(counts) == set(range(E)) and max(counts.values()) < 1.25 * min(counts.values())
    experts(x, index.long(), weights)


def test_calls_with_fewer_experts_for_each_token_are_sampled_too():
    experts = Mixture().experts
    (seen,) = seen_layers.seen_layers({"experts": experts})
    x, index, weights = torch.randn(4, HIDDEN), torch.tensor([[0, 1, 2]] * 4), torch.rand(4, 3)
    seen.note((x[:2], index[:2, :1], weights[:2, :1]), {})
    seen.note((), {"hidden_states": x[2:], "top_k_index": index[2:], "top_k_weights": weights[2:]})
    inputs = seen.sampled()
    assert inputs[1].tolist() == [[0, E, E]] * 2 + [[0, 1, 2]] * 2
    exact = experts.double()
    wanted = torch.cat(
        [
            exact(x[:2].double(), index[:2, :1], weights[:2, :1].double()),
            exact(x[2:].double(), index[2:], weights[2:].double()),
        ]
    )
    torch.testing.assert_close(seen.exact_output(*inputs), wanted)


def test_experts_that_share_their_weights_are_one_layer():
    model = Mixture().eval()
    model.other = Experts(torch.float32)
    model.other.gate_up_proj, model.other.down_proj = model.experts.gate_up_proj, model.experts.down_proj
    (linear, experts) = seen_layers.seen_layers(
        {"before": model.before, "experts": model.experts, "other": model.other}
    )
    assert [*linear.modules] == ["before"] and [*experts.modules] == ["experts", "other"]
    packed = experts.pack(INT8.spec(torch.float32))
    stand_in = experts.in_place_of(model.other, packed, INT8.spec(torch.float32))
    assert (
        stand_in.gate_up_proj is packed.gate_up_proj
        and experts.in_place_of(model.experts, packed, INT8.spec(torch.float32)) is packed
    )


def test_experts_of_an_unknown_form_stay_float_with_the_reason(x, make_plan):
    plan = make_plan(Mixture(scale=2.0).eval(), x, [INT8], {"int8": 4.0})
    row = of(plan)["experts"]
    assert row.spec is None and "computes something else than experts" in row.note and of(plan)["before"].spec


def test_a_bound_of_the_users_own_includes_experts(x, make_plan):
    model = Mixture().eval()
    wanted = model(x).detach()

    def loss(changed: nn.Module) -> float:
        return 1 + float((changed(x) - wanted).square().mean())

    plan = make_plan(model, x, [W4A8, INT8], {"int4": 2.0, "int8": 4.0}, -math.inf, evaluate=loss, at_most=1 + 1e-9)
    assert not plan.specs
    plan = make_plan(model, x, [W4A8, INT8], {"int4": 2.0, "int8": 4.0}, -math.inf, evaluate=loss, at_most=9.0)
    assert {spec.format for spec in plan.specs.values()} == {"int4"} and "experts" in plan.specs


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"row": "linear_int8_scalar"}, "experts: row must be empty for experts, got 'linear_int8_scalar'"),
        ({"shape": [6, 6, 64, 64]}, r"experts: shape must be \(n, k\) or \(experts, n, k\), got \(6, 6, 64, 64\)"),
    ],
)
def test_a_row_of_a_file_that_no_experts_can_have_is_refused(change, text, x, make_plan, tmp_path):
    document = make_plan(Mixture().eval(), x, [INT8], {"int8": 4.0}).to_dict()
    document["rows"][1] |= change
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=text):
        lowbit.Plan.load(tmp_path / "plan.json")


def test_a_plan_of_another_model_names_its_experts(x, make_plan):
    plan = make_plan(Mixture().eval(), x, [INT8], {"int8": 4.0})
    other = Mixture().eval()
    other.experts.gate_up_proj = nn.Parameter(torch.randn(E + 1, 2 * INNER, HIDDEN))
    with pytest.raises(ValueError, match=r"got experts \(7 x 64 x 64, wanted 6 x 64 x 64\)"):
        plan.apply(other)
    other.experts = nn.Linear(HIDDEN, HIDDEN)
    with pytest.raises(ValueError, match="got experts"):
        plan.apply(other)
    missing = lowbit.Plan([row for row in plan.rows if row.layer != "experts"], 20.0)
    with pytest.raises(ValueError, match=r"got experts \(no line in the plan\)"):
        missing.apply(Mixture())


def test_the_real_timer_measures_experts():
    model = Mixture().eval()
    plan = lowbit.autoquant(model, torch.randn(3, HIDDEN), candidates=[INT8], min_sqnr=None, cache=False)
    row = of(plan)["experts"]
    assert row.float_seconds > 0 and row.seconds > 0


def test_codes_of_experts_are_those_of_quantize_with_the_same_calibration(make_plan):
    model = Mixture().eval()
    batches = list(torch.randn(3, 2, 40, HIDDEN, generator=torch.Generator().manual_seed(5)))
    config = lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ())
    plan = make_plan(model, batches[0], [config], {"int4": 2.0}, -math.inf, calibration=batches)
    wanted, got = copy.deepcopy(model), copy.deepcopy(model)
    lowbit.quantize_(wanted, config, calibration=batches)
    plan.apply(got)
    assert of(plan)["experts"].spec.algorithm == lowbit.GPTQ()
    for key in ("gate_up_proj", "down_proj"):
        assert torch.equal(getattr(wanted.experts, key), getattr(got.experts, key))
    noise = (model(batches[0]).double() - got(batches[0]).double()).square().sum()
    assert plan.model_db == pytest.approx(10 * math.log10(model(batches[0]).double().square().sum() / noise), abs=1e-6)
