# SPDX-License-Identifier: Apache-2.0
"""QuantExperts: every format beside the float module with the decoded weights in float64, pairs of no expert, gradients,
state dicts, and modules that stay float with the reason."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import _C, QuantExperts
from lowbit.quant.experts import Form, dense_product
from lowbit.quant.kinds import LayerWeight, layout_name, packed_weights, weights_of
from lowbit.quant.layout import numbers_of
from lowbit.quant.packing import Selected, hold_packed, pack_weight
from lowbit.quant.quant_experts import EXPERTS

E, HIDDEN, INNER, TOKENS, PICKED = 5, 100, 36, 23, 3
EPSILON = 2.0**-24


class Experts(nn.Module):
    """As transformers has them, in plain torch: gated, or an MLP, transposed, in turns, with biases."""

    gated, turned, turns = True, False, False

    def __init__(self, *, bias: bool = False, inner: int = INNER) -> None:
        super().__init__()
        self.is_transposed, self.is_concatenated, self.num_experts = self.turned, not self.turns, E
        self.act_fn = nn.SiLU()
        first = "gate_up_proj" if self.gated else "up_proj"
        for key, n, k in ((first, inner * (1 + self.gated), HIDDEN), ("down_proj", HIDDEN, inner)):
            weight = torch.randn(E, n, k) * k**-0.5
            self.register_parameter(key, nn.Parameter(weight.mT.contiguous() if self.turned else weight))
            if bias:
                self.register_parameter(f"{key}_bias", nn.Parameter(torch.randn(E, n) / 4))

    def product(self, key: str, x: Tensor, expert: int) -> Tensor:
        weight, bias = getattr(self, key)[expert], self._parameters.get(f"{key}_bias")
        return nn.functional.linear(x, weight.T if self.turned else weight, None if bias is None else bias[expert])

    def _apply_gate(self, hidden: Tensor) -> Tensor:
        gate, up = (hidden[..., ::2], hidden[..., 1::2]) if self.turns else hidden.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in range(E):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            hidden = self.product("gate_up_proj" if self.gated else "up_proj", hidden_states[token], expert)
            hidden = self._apply_gate(hidden) if self.gated else self.act_fn(hidden)
            y = self.product("down_proj", hidden, expert) * top_k_weights[token, place, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result


class Turned(Experts):
    turned = True


class InTurns(Experts):
    turned = turns = True


class Ungated(Experts):
    gated = False


class UngatedTurned(Ungated):
    turned = True


CLASSES = [Experts, Turned, InTurns, Ungated, UngatedTurned]


def routed(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, experts of each token with one that is named twice and one without tokens, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    index = torch.randint(0, E - 1, (TOKENS, PICKED), generator=generator)
    index[2] = 1
    return x, index, torch.rand(TOKENS, PICKED, generator=generator)


def made(cls: type[Experts] = Experts, **options: Any) -> Experts:
    torch.manual_seed(0)
    return cls(**options)


def decoded(experts: QuantExperts) -> nn.Module:
    """The float module with the weights that the packed ones stand for, in float64."""
    twin = copy.deepcopy(experts)
    lowbit.dequantize_(twin, torch.float32)
    return twin.double()


def budget(experts: Any, x: Tensor, index: Tensor, weights: Tensor, epsilon: float) -> Tensor:
    """The error that roundings of ``epsilon`` may make, to first order: of each product k + 8 of the sum of its absolute
    terms, carried through the gate, whose factors and slopes are at most 1.1."""
    first, down = (LayerWeight(of.key, of.n, of.k, of.bias, E, of.transposed) for of in weights_of(experts))  # rows as they lie

    def absolute(weight: LayerWeight, value: Tensor, *, bias: bool = True) -> Tensor:
        held = experts._parameters[weight.bias].abs() if bias and weight.bias else None
        return dense_product(weight, experts._parameters[weight.key].abs(), value.abs(), index, held)

    held = experts._parameters[first.bias] if first.bias else None
    hidden = dense_product(first, experts._parameters[first.key], x, index, held)
    off = (first.k + 8) * epsilon * absolute(first, x)
    if experts.gated:
        (gate, up), (gate_off, up_off) = (
            (value[..., ::2], value[..., 1::2]) if experts.turns else value.chunk(2, dim=-1) for value in (hidden, off)
        )
        inside = experts.act_fn(gate) * up
        off = 1.1 * (up.abs() + up_off) * gate_off + experts.act_fn(gate).abs() * up_off
    else:
        inside, off = experts.act_fn(hidden), 1.1 * off
    off = absolute(down, off + 8 * epsilon * inside.abs(), bias=False)
    return ((off + (down.k + 8) * epsilon * absolute(down, inside)) * weights.double()[..., None]).sum(1)


@pytest.mark.core
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_result_is_that_of_the_decoded_weights_in_float64(cls: type[Experts], bias: bool, config: Any) -> None:
    experts = made(cls, bias=bias)
    report = lowbit.quantize_(experts, config)
    assert type(experts) is QuantExperts and not report.left and len(report.quantized) == 2
    spec = config.spec(torch.float32)
    x, index, weights = routed()
    with torch.no_grad():
        y = experts(x, index, weights)
        assert _C.last_kernel("gather_linear") == report.rows[1].kernel
        if spec.x_format == "float":
            exact = decoded(experts)
            wanted = exact(x.double(), index, weights.double())
            allowed = budget(exact, x.double(), index, weights, EPSILON if not spec.is_float else 2.0**-8)
            assert ((y - wanted).abs() <= allowed).all()
        else:
            assert torch.equal(y, by_linear(experts, x, index, weights))


def by_linear(experts: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """One call of `linear` for each expert: with int8 activations the same bits; with float8 ones x is scaled alike."""
    form, twin = experts.form, copy.deepcopy(experts)

    def product(key: str, value: Tensor, pairs: Tensor) -> Tensor:
        value = value[:, None].expand(*pairs.shape, -1) if value.dim() == 2 else value
        args, bias = experts.op_args[key], experts._parameters.get(f"{key}_bias")
        y = value.new_empty(*pairs.shape, args[0])
        for expert in range(E):
            mine = pairs == expert
            in_turns = form.interleaved and key == form.first
            of_expert = None if bias is None or in_turns else bias[expert]
            rows = torch.ops.lowbit.linear(value[mine], getattr(experts, key)[expert], *args, of_expert)
            if in_turns:
                rows = rows.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
                rows = rows if bias is None else rows + bias[expert]
            y[mine] = rows
        return y

    hidden = product(form.first, x, index)
    twin.__class__ = experts.float_class
    hidden = twin._apply_gate(hidden) if form.gated else twin.act_fn(hidden)
    y = product("down_proj", hidden, index)
    total = torch.zeros(len(x), y.shape[-1])
    for j in range(index.shape[1]):
        total = torch.addcmul(total, y[:, j], weights[:, j, None])
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("router", [torch.float32, torch.bfloat16])
def test_activations_and_shares_of_other_dtypes(dtype: torch.dtype, router: torch.dtype) -> None:
    experts = made(InTurns, bias=True).to(dtype)
    lowbit.quantize_(experts, lowbit.int4_weight_only(group_size=32))
    x, index, weights = routed(dtype=dtype)
    weights = weights.to(router)
    y = experts(x, index, weights)
    assert y.dtype == dtype
    exact = decoded(experts)
    allowed = budget(exact, x.double(), index, weights, 2.0**-9 if dtype == torch.bfloat16 else 2.0**-11)
    assert ((y - exact(x.double(), index, weights.double())).abs() <= allowed).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert experts.float()(x.float(), index, weights).dtype == torch.float32


def test_the_sum_over_the_experts_of_a_token_is_in_float32_in_their_order() -> None:
    experts = made().bfloat16()
    lowbit.quantize_(experts, lowbit.int8_weight_only())
    x, index, weights = routed(dtype=torch.bfloat16)
    y = experts(x, index, weights)
    parts = [experts(x, index[:, j : j + 1], torch.ones(TOKENS, 1)) for j in range(PICKED)]
    total = torch.zeros(TOKENS, HIDDEN)
    for j, part in enumerate(parts):
        total = torch.addcmul(total, part.float(), weights[:, j, None])
    # An expert has other rows in calls of its own, so that sums inside of products may have another order.
    assert (y - total.bfloat16()).abs().max() <= 2.0**-7 * total.abs().max()
    turned = experts(x, index.flip(1), weights.flip(1))
    assert (turned - y).abs().max() <= 2.0**-7 * total.abs().max()


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_index_of_the_number_of_experts_adds_nothing(cls: type[Experts], dtype: torch.dtype) -> None:
    experts = made(cls, bias=True)
    lowbit.quantize_(experts, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    x, index, weights = routed()
    index[::2, 1] = E
    index[5] = E
    weights.requires_grad_()
    y = experts(x, index.to(dtype), weights)
    assert torch.equal(y[5], torch.zeros(HIDDEN))
    shares = weights.detach().masked_fill(index == E, 0)
    assert torch.equal(y, experts(x, index.masked_fill(index == E, 0), shares))
    y.sum().backward()
    assert torch.equal(weights.grad[index == E], torch.zeros(int((index == E).sum()))) and weights.grad[index != E].all()


def test_what_is_not_finite_stays_with_its_token() -> None:
    experts = made(bias=True)
    lowbit.quantize_(experts, lowbit.int8_weight_only())
    x, index, weights = routed()
    clean = experts(x, index, weights)
    weights[3, 0], x[7, 5] = torch.nan, torch.inf
    y = experts(x, index, weights)
    rest = torch.ones(TOKENS, dtype=torch.bool).index_fill_(0, torch.tensor([3, 7]), False)
    assert y[3].isnan().all() and not y[7].isfinite().all() and torch.equal(y[rest], clean[rest])
    x[7], index[7], weights[3, 0] = 3e38, E, 0.5  # 3e38 overflows in the products
    assert torch.equal(experts(x, index, weights)[7], torch.zeros(HIDDEN))


@pytest.mark.parametrize("cls", [Experts, InTurns])
def test_gradients_are_those_of_the_decoded_weights(cls: type[Experts]) -> None:
    experts = made(cls, bias=True)
    lowbit.quantize_(experts, lowbit.int4_weight_only(group_size=32))
    exact = decoded(experts).float()
    x, index, weights = routed()
    index[4, 0] = E
    grad = torch.randn(TOKENS, HIDDEN)
    found = []
    for module in (experts, exact):
        given = x.clone().requires_grad_(), weights.clone().requires_grad_()
        module(given[0], index, given[1]).backward(grad)
        found.append([given[0].grad, given[1].grad, *(getattr(module, f"{key}_bias").grad for key in ("gate_up_proj", "down_proj"))])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert experts.gate_up_proj.grad is None


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("layout", ["x86-panel-16x64", "row-major"])
def test_a_state_dict_has_the_meaning_of_its_bytes(cls: type[Experts], layout: str, config: Any) -> None:
    experts = made(cls, bias=True)
    lowbit.quantize_(experts, config)
    state = experts.state_dict()
    first = experts.form.first
    assert state.keys() == {name for key in (first, "down_proj") for name in (key, f"{key}_layout", f"{key}_bias")}
    assert all(numbers_of(state[layout_name(key)]).experts == E for key in (first, "down_proj"))
    x, index, weights = routed()
    y = experts(x, index, weights)
    state = lowbit.quant.repack(state, layout)
    with torch.device("meta"):
        skeleton = cls(bias=True)
    assert lowbit.load(skeleton, state) == [""] and torch.equal(skeleton(x, index, weights), y)
    other = made(cls, bias=True)
    lowbit.quantize_(other, config)
    other.load_state_dict(state)
    assert torch.equal(other(x, index, weights), y)
    for loaded in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert torch.equal(loaded(x, index, weights), y)
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    assert lowbit.load(made(cls, bias=True), torch.load(stored)) == [""]


def test_two_weights_may_have_two_formats_and_one_may_be_float() -> None:
    """Files of llama.cpp hold down_proj in more bits, and while layers become packed others may call them."""
    experts = made(InTurns, bias=True)
    x, index, weights = routed()
    exact = experts(x, index, weights)
    configs = {"gate_up_proj": lowbit.int4_weight_only(group_size=32), "down_proj": lowbit.int8_weight_only()}
    for weight in weights_of(experts):
        spec, value = configs[weight.key].spec(torch.float32), experts._parameters[weight.key]
        packed, _ = pack_weight(weight.matrix(value.detach()), spec)
        hold_packed(Selected.of("", experts, weight, spec, value), packed, _C.LAYOUT)
        y = experts(x, index, weights)
        torch.testing.assert_close(y, decoded(experts).float()(x, index, weights), rtol=1e-4, atol=1e-4)
        assert 0.01 < (y - exact).norm() / exact.norm() < 0.3
        loaded = made(InTurns, bias=True)
        lowbit.load(loaded, experts.state_dict())
        assert packed_weights(loaded) == packed_weights(experts) and torch.equal(loaded(x, index, weights), y)
    assert [EXPERTS.spec_of(experts, weight).name for weight in weights_of(experts)] == ["int4 g32", "int8 per-channel"]
    state = experts.state_dict()
    state["down_proj_layout"] = state["gate_up_proj_layout"]
    with pytest.raises(ValueError, match="down_proj must be packed as int8 per-channel of 5 matrices of n=100 k=36, got int4"):
        experts.load_state_dict(state)


def test_the_float_module_comes_back() -> None:
    for cls in CLASSES:
        experts = made(cls, bias=True).bfloat16()
        before = copy.deepcopy(experts)
        handle = experts.register_forward_hook(lambda *_: None)
        lowbit.quantize_(experts, lowbit.int8_weight_only())
        assert lowbit.dequantize_(experts) == [""] and type(experts) is cls and handle.id in experts._forward_hooks
        assert vars(experts).keys() == vars(before).keys()
        for key, value in before.state_dict().items():
            got = experts.state_dict()[key]
            assert got.dtype == value.dtype and got.shape == value.shape
            assert (got - value).abs().max() <= (0 if key.endswith("bias") else 0.02)


def test_the_report_has_a_line_for_each_weight() -> None:
    model = nn.Sequential(nn.Linear(8, 8), made())
    before = model[1].down_proj.nbytes
    report = lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32))
    assert [(row.layer, row.shape) for row in report.rows] == [
        ("0", (8, 8)), ("1.gate_up_proj", (E, 2 * INNER, HIDDEN)), ("1.down_proj", (E, HIDDEN, INNER)),
    ]  # fmt: skip
    row = report.rows[2]
    assert (row.bytes_before, row.bytes_after) == (before, model[1].down_proj.nbytes) and 20 < row.error_db < 24
    assert row.error_db > row.absmax_db and not report.left
    assert "5x100x36" in str(report) and "gate_up_proj int4 g32 of 5 matrices of n=72 k=100" in repr(model[1])
    with pytest.raises(ValueError, match="quantize_: 1 is already quantized as int4 g32"):
        lowbit.quantize_(model, lowbit.int8_weight_only(), lambda module, name: name == "1")


class Halved(Experts):
    """Computes half of what its parameters say."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights) / 2


class Untried(Experts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise RuntimeError("only on GPUs")


def scaled(experts: Experts) -> Experts:
    experts.scale = nn.Parameter(torch.ones(E))
    return experts


def replaced(experts: Experts) -> Experts:
    experts.forward = lambda *args: experts.down_proj
    return experts


def other_shape(experts: Experts) -> Experts:
    experts.down_proj = nn.Parameter(torch.zeros(E, HIDDEN, INNER + 1))
    return experts


def in_float64(experts: Experts) -> Experts:
    return experts.double()


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: made(Halved), r"Halved computes something else than experts, off by 1\.0e\+00"),
    (lambda: made(Untried), "Untried could not be tried: RuntimeError: only on GPUs"),
    (lambda: scaled(made()), "it has scale beside its weights"),
    (lambda: replaced(made()), "its forward was replaced on the instance"),
    (lambda: other_shape(made()), r"its weights do not fit each other: gate_up_proj \[5, 72, 100\] and down_proj \[5, 100, 37\]"),
    (lambda: in_float64(made()), "its gate_up_proj is a Parameter of torch.float64"),
])  # fmt: skip
def test_a_module_that_computes_something_else_stays_float(make: Callable[[], nn.Module], reason: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), make())
    cls, state = type(model[1]), copy.deepcopy(model[1].state_dict())
    report = lowbit.quantize_(model, lowbit.int8_weight_only())
    (row,) = report.skipped
    assert row.layer == "1" and re.fullmatch(reason, row.note)
    assert type(model[1]) is cls and all(torch.equal(value, state[key]) for key, value in model[1].state_dict().items())
    with pytest.raises(ValueError, match=f"quantize_: 1 cannot be quantized: {reason}"):
        lowbit.quantize_(model, lowbit.int8_weight_only(), lambda module, name: name == "1")


def test_the_class_is_tried_without_its_hooks_and_without_a_change() -> None:
    experts = made()
    seen: list[Any] = []
    experts.register_forward_hook(lambda *_: seen.append(0))
    experts.act_fn.register_forward_pre_hook(lambda *_: seen.append(0))
    state = torch.get_rng_state()
    assert EXPERTS.refuses(experts) == "" and Form.of(experts) is not None
    assert not seen and torch.equal(torch.get_rng_state(), state) and type(experts) is Experts
    with torch.device("meta"):
        assert EXPERTS.refuses(Experts()) == ""


def test_bad_input_is_refused_by_name() -> None:
    experts = made()
    lowbit.quantize_(experts, lowbit.int8_weight_only())
    x, index, weights = routed()
    for change, error, text in (
        ({"hidden_states": x[None]}, ValueError, r"QuantExperts: hidden_states must have shape \[T, H\], got \[1, 23, 100\]"),
        ({"top_k_index": index[1:]}, ValueError, r"QuantExperts: top_k_index must have shape \[23, J\], got \[22, 3\]"),
        ({"top_k_weights": weights[:, 1:]}, ValueError, r"QuantExperts: top_k_weights must have shape \[23, 3\], got \[23, 2\]"),
        ({"hidden_states": x[:, 1:]}, ValueError, r"gather_linear: x must have shape"),
        ({"hidden_states": x.double()}, TypeError, "gather_linear: x must be float32, bfloat16 or float16, got float64"),
        ({"top_k_index": index.float()}, TypeError, "gather_linear: index must be int32 or int64, got float32"),
        ({"top_k_index": index + 3}, ValueError, r"gather_linear: index must be 0 to 4, .* = 6"),
        ({"top_k_index": index - 1}, ValueError, r"gather_linear: index must be 0 to 4, .* = -1"),
    ):
        given = {"hidden_states": x, "top_k_index": index, "top_k_weights": weights} | change
        with pytest.raises(error, match=text):
            experts(**given)
    with pytest.raises(TypeError, match="QuantExperts: made of a float module of experts"):
        QuantExperts()
    broken = nn.Sequential(nn.Linear(8, 8), made())
    broken[1].down_proj.data[2, 3, 4] = torch.nan
    with pytest.raises(ValueError, match="quantize_: down_proj of 1 must be finite"):
        lowbit.quantize_(broken, lowbit.int8_weight_only())
    assert type(broken[0]) is nn.Linear and type(broken[1]) is Experts


def test_no_tokens_and_none_of_their_experts() -> None:
    experts = made(bias=True)
    lowbit.quantize_(experts, lowbit.int8_weight_only())
    x, index, weights = routed()
    assert experts(x[:0], index[:0], weights[:0]).shape == (0, HIDDEN)
    assert torch.equal(experts(x, index[:, :0], weights[:, :0]), torch.zeros(TOKENS, HIDDEN))


def test_gptq_leaves_them_float_and_a_calibration_passes_them_by() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"linear": nn.Linear(HIDDEN, HIDDEN), "experts": made()})
    x, index, weights = routed()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["experts"](self.parts["linear"](x), index, weights)

    both = Both()
    searched = copy.deepcopy(both)
    report = lowbit.quantize_(both, lowbit.int4_weight_only(group_size=32, algorithm=lowbit.GPTQ()), calibration=[x])
    (row,) = report.skipped
    assert row.note == "GPTQ needs its inputs, which calibrate does not count of a module of experts"
    report = lowbit.quantize_(searched, lowbit.int4_weight_only(group_size=32), calibration=[x])
    assert len(report.quantized) == 3 and not report.skipped


def test_a_graph_of_it_has_no_break() -> None:
    experts = made(InTurns, bias=True).requires_grad_(False)
    lowbit.quantize_(experts, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    x, index, weights = routed()
    compiled = torch.compile(experts, fullgraph=True, backend="eager", dynamic=True)
    assert torch.equal(compiled(x, index, weights), experts(x, index, weights))
    assert torch.equal(compiled(x[:7], index[:7], weights[:7]), experts(x[:7], index[:7], weights[:7]))
    exported = torch.export.export(experts, (x, index, weights), dynamic_shapes=({0: torch.export.Dim("t")},) * 3)
    assert torch.equal(exported.module()(x[:9], index[:9], weights[:9]), experts(x[:9], index[:9], weights[:9]))
