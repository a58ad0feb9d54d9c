# SPDX-License-Identifier: Apache-2.0
"""Subclasses of nn.Linear: those that compute F.linear are packed, the others stay float with the reason."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import lowbit
from lowbit.quant import QuantLinear


class ByHand(nn.Linear):
    """As Falcon's."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = hidden_states @ self.weight.T
        return y if self.bias is None else y + self.bias


class Renamed(nn.Linear):
    """Has no forward of its own."""


class InItsOwnDtype(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("this class has no float64")
        return F.linear(x, self.weight, self.bias)


class WithReset(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return "mine"


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class WithoutBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-1000, 1000))


class Rounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.half().to(x.dtype))


class Routing(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.softmax(-1)


class NoisyInTraining(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class WithResidual(nn.Linear):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if residual is None else y + residual


class WithAdapter(nn.Linear):
    """Computes F.linear as long as the adapter is 0."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.adapter = nn.Parameter(torch.zeros(sizes[1], sizes[0]))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.adapter, self.bias)


class Called(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 1


class Broken(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not now")


class WithMethod(nn.Linear):
    def norm(self) -> Tensor:
        return self.weight.norm()


OTHERS = {
    Doubled: "Doubled, a subclass of nn.Linear, has a forward that does not give F.linear",
    WithoutBias: "does not give F.linear",
    Clamped: "does not give F.linear",
    Rounded: "does not give F.linear",
    Routing: "does not give F.linear",
    NoisyInTraining: "does not give F.linear",
    Broken: "does not give F.linear",
    WithResidual: "has a forward that takes more than x",
    WithAdapter: "has adapter beside weight and bias",
    Called: "has a call of its own",
    WithMethod: "has norm, which a packed layer lacks",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [ByHand, Renamed, InItsOwnDtype, WithReset])
def test_a_subclass_that_computes_linear_is_packed_and_given_back(cls: type[nn.Linear], dtype: torch.dtype) -> None:
    model = nn.Sequential(cls(64, 32), cls(32, 48, bias=False)).to(dtype)
    plain = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 48, bias=False)).to(dtype)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(5, 64, dtype=dtype)
    for each in (model, plain):
        report = lowbit.quantize_(each, lowbit.int8_weight_only(), strict=True)
        assert len(report.quantized) == 2 and all(isinstance(layer, QuantLinear) for layer in each)
    assert torch.equal(model(x), plain(x))
    lowbit.dequantize_(model)
    assert all(type(layer) is cls for layer in model)


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
def test_others_stay_float_and_the_report_has_the_reason(cls: type[nn.Linear]) -> None:
    model = nn.Sequential(cls(64, 32), nn.Linear(32, 32))
    (skipped,) = lowbit.quantize_(model, lowbit.int4_weight_only(32)).skipped
    assert type(model[0]) is cls and skipped.layer == "0"
    assert OTHERS[cls] in skipped.note


def test_the_trial_changes_nothing() -> None:
    layer, calls = NoisyInTraining(64, 32), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    before, state, mode = copy.deepcopy(layer.state_dict()), torch.random.get_rng_state(), layer.training
    lowbit.quantize_(nn.Sequential(layer), lowbit.int8_weight_only())
    assert not calls and layer.training == mode and torch.equal(torch.random.get_rng_state(), state)
    assert (layer.in_features, layer.out_features) == (64, 32)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_the_trial_needs_no_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(ByHand(64, 32), Doubled(32, 32))
        lowbit.quantize_(model, lowbit.int8_weight_only())
    assert isinstance(model[0], QuantLinear) and type(model[1]) is Doubled


def test_a_subclass_with_methods_of_its_own_is_packed_if_asked_for() -> None:
    model = nn.Sequential(WithMethod(64, 32))
    lowbit.quantize_(model, lowbit.int8_weight_only(), lambda module, _: isinstance(module, nn.Linear))
    assert isinstance(model[0], QuantLinear)


def test_autoquant_and_sparsify_choose_them_too() -> None:
    model = nn.Sequential(ByHand(64, 32), Doubled(32, 32))
    plan = lowbit.autoquant(model, torch.randn(4, 64), min_sqnr=None, candidates=[lowbit.int8_weight_only()], cache=False)
    assert {row.layer: "subclass" in row.note for row in plan.rows} == {"0": False, "1": True}
    assert [row.layer for row in lowbit.sparsify_(model, lowbit.semi_sparse_weight()).quantized] == ["0"]
