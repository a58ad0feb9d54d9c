# SPDX-License-Identifier: Apache-2.0
"""QuantExperts: every format beside the decoded weights in float64, pairs of no expert, gradients, state dicts, and modules
that stay float with the reason. The steps between the products are in test_expert_gates.py."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_modules import (
    CLASSES,
    HIDDEN,
    INNER,
    PICKED,
    TOKENS,
    E,
    Experts,
    InTurns,
    Ungated,
    UngatedTurned,
    decoded,
    layer_of,
    made,
    routed,
)
from torch import Tensor, nn

import lowbit
from lowbit import _C, QuantExperts
from lowbit.quant.experts import Form
from lowbit.quant.kinds import layout_name, packed_weights, weights_of
from lowbit.quant.layout import numbers_of
from lowbit.quant.packing import Selected, hold_packed, pack_weight
from lowbit.quant.quant_experts import EXPERTS
from lowbit.testing import assert_within


@pytest.mark.core
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_result_is_that_of_the_decoded_weights_in_float64(cls: type[Experts], bias: bool, config: Any) -> None:
    experts = made(cls, bias=bias)
    report = lowbit.quantize_(experts, config)
    assert type(experts) is QuantExperts and not report.left and len(report.quantized) == 2
    x, index, weights = routed()
    with torch.no_grad():
        y = experts(x, index, weights)
    assert [row.kernel for row in report.rows] == [_C.last_kernel("experts")] * 2
    assert_within(y, *layer_of(experts)(x, index, weights), f"{config} {cls.__name__}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("router", [torch.float32, torch.bfloat16, torch.float64])
def test_activations_and_shares_of_other_dtypes(dtype: torch.dtype, router: torch.dtype) -> None:
    experts = made(InTurns, bias=True).to(dtype)
    lowbit.quantize_(experts, lowbit.int4_weight_only(group_size=32))
    x, index, weights = routed(dtype=dtype)
    weights = weights.to(router)
    y = experts(x, index, weights)
    assert y.dtype == dtype
    assert_within(y, *layer_of(experts)(x, index, weights), f"{dtype} {router}")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert experts.float()(x.float(), index, weights).dtype == torch.float32


def test_the_results_of_a_token_are_added_in_the_order_of_experts() -> None:
    """Whatever their order in top_k_index: a token has the same bits, and with int8 activations in any batch."""
    _, _, weights = routed()
    index = torch.rand(TOKENS, E).argsort(1)[:, :PICKED]
    for config in (lowbit.int8_weight_only(), lowbit.int8_dynamic_activation_int4_weight(group_size=32)):
        experts = made(bias=True).bfloat16()
        lowbit.quantize_(experts, config)
        x = routed(dtype=torch.bfloat16)[0]
        y = experts(x, index, weights)
        assert torch.equal(experts(x, index.flip(1), weights.flip(1)), y)
    each = [experts(x[t : t + 1], index[t : t + 1], weights[t : t + 1]) for t in range(TOKENS)]
    assert torch.equal(torch.cat(each), y)


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
    assert experts.op_gate is not None
    state = experts.state_dict()
    state["down_proj_layout"] = state["gate_up_proj_layout"]
    with pytest.raises(ValueError, match="down_proj must be packed as int8 per-channel of 5 matrices of n=100 k=36, got int4"):
        experts.load_state_dict(state)


def test_activations_of_one_product_alone_may_be_rounded() -> None:
    """The op `experts` has no such call: two of gather_linear."""
    experts = made(bias=True)
    configs = {"gate_up_proj": lowbit.int8_dynamic_activation_int4_weight(group_size=32), "down_proj": lowbit.int8_weight_only()}
    for weight in weights_of(experts):
        spec, value = configs[weight.key].spec(torch.float32), experts._parameters[weight.key]
        item = Selected.of("", experts, weight, spec, value)
        hold_packed(item, pack_weight(weight.matrix(value.detach()), spec)[0], _C.LAYOUT)
    assert experts.op_gate is None and item.kernel.startswith("gather_linear_int8_")
    x, index, weights = routed()
    assert_within(experts(x, index, weights), *layer_of(experts)(x, index, weights), "int8 activations, then float ones")


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
    model = nn.Sequential(nn.Linear(8, 16), made())
    before = model[1].down_proj.nbytes
    report = lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32))
    assert [(row.layer, row.shape) for row in report.rows] == [
        ("0", (16, 8)), ("1.gate_up_proj", (E, 2 * INNER, HIDDEN)), ("1.down_proj", (E, HIDDEN, INNER)),
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


def square(cls: type[Experts], *, told: bool) -> Experts:
    """Experts whose matrices are square, so that shapes do not tell whether they are transposed."""
    experts = made(cls, inner=HIDDEN)
    if not told:
        del experts.is_transposed
    return experts


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
    (lambda: square(UngatedTurned, told=False), r"UngatedTurned computes something else than experts, off by 1\.\de\+00"),
    (lambda: in_float64(made()), "its gate_up_proj is a Parameter of torch.float64"),
])  # fmt: skip
def test_a_module_that_computes_something_else_stays_float(make: Callable[[], nn.Module], reason: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), make())
    cls, state = type(model[1]), copy.deepcopy(model[1].state_dict())
    report = lowbit.quantize_(model, lowbit.int8_weight_only())
    (row,) = report.skipped
    assert row.layer == "1" and re.fullmatch(reason, row.note)
    assert type(model[1]) is cls and all(torch.equal(value, state[key]) for key, value in model[1].state_dict().items())
    with pytest.raises(ValueError, match=f"quantize_: 1 cannot be quantized: {reason}"):
        lowbit.quantize_(model, lowbit.int8_weight_only(), lambda module, name: name == "1")


@pytest.mark.parametrize(("cls", "told"), [(Ungated, False), (Ungated, True), (UngatedTurned, True), (InTurns, True)])
def test_square_weights_are_packed_in_the_order_of_their_class(cls: type[Experts], told: bool) -> None:
    experts = square(cls, told=told)
    wanted = copy.deepcopy(experts)
    lowbit.quantize_(experts, lowbit.int8_weight_only())
    x, index, weights = routed()
    assert (experts(x, index, weights) - wanted(x, index, weights)).norm() < 0.02 * wanted(x, index, weights).norm()


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
        ({"hidden_states": x[:, 1:]}, ValueError, r"experts: x must have shape"),
        ({"hidden_states": x.double()}, TypeError, "experts: x must be float32, bfloat16 or float16, got float64"),
        ({"top_k_index": index.float()}, TypeError, "experts: index must be int32 or int64, got float32"),
        ({"top_k_index": index.short()}, TypeError, "experts: index must be int32 or int64, got int16"),
        ({"top_k_weights": weights.long()}, TypeError, "QuantExperts: top_k_weights must be floats, got int64"),
        ({"top_k_weights": weights > 0.5}, TypeError, "QuantExperts: top_k_weights must be floats, got bool"),
        ({"top_k_index": index + 3}, ValueError, r"experts: index must be 0 to 4, .* = 6"),
        ({"top_k_index": index - 1}, ValueError, r"experts: index must be 0 to 4, .* = -1"),
    ):
        given = {"hidden_states": x, "top_k_index": index, "top_k_weights": weights} | change
        with pytest.raises(error, match=text):
            experts(**given)
    with pytest.raises(TypeError, match="QuantExperts: made of a float module of experts"):
        QuantExperts()
    broken = nn.Sequential(nn.Linear(8, 16), made())
    broken[1].down_proj.data[2, 3, 4] = torch.nan
    with pytest.raises(ValueError, match="quantize_: down_proj of 1 must be finite"):
        lowbit.quantize_(broken, lowbit.int8_weight_only())
    assert type(broken[0]) is nn.Linear and type(broken[1]) is Experts


@pytest.mark.parametrize("cls", CLASSES)
def test_on_the_meta_device_results_have_their_shape_and_dtype(cls: type[Experts]) -> None:
    """With one op and with two; in autocast too, which torch does not have for that device."""
    x, index, weights = (tensor.to("meta") for tensor in routed(dtype=torch.bfloat16))
    for config in (lowbit.int8_weight_only(), lowbit.float8_weight_only()):
        with torch.device("meta"):
            experts = cls(bias=True).bfloat16()
        lowbit.quantize_(experts, config)
        for op_gate in (experts.op_gate, None):
            experts.__dict__["op_gate"] = op_gate
            with torch.autocast("cpu", dtype=torch.float16, enabled=op_gate is None):
                y = experts(x, index, weights)
            assert y.is_meta and y.shape == (TOKENS, HIDDEN) and y.dtype == torch.bfloat16


def test_in_autocast_a_graph_has_the_dtype_of_the_module() -> None:
    experts = made(bias=True)
    lowbit.quantize_(experts, lowbit.int8_weight_only())
    x, index, weights = routed()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = experts(x, index, weights)
        assert torch.equal(torch.compile(experts, fullgraph=True, backend="aot_eager")(x, index, weights), y)
    with torch.no_grad():
        assert y.dtype == x.dtype and torch.equal(y, experts(x.bfloat16(), index, weights).float())


def test_weights_in_fours_are_pruned_by_expert() -> None:
    """2:4 is a format like others: the result is that of the weights that are left."""
    experts = made(bias=True)
    lowbit.quantize_(experts, lowbit.int8_dynamic_activation_int8_semi_sparse_weight())
    exact, (x, index, weights) = decoded(experts), routed()
    kept = (exact.gate_up_proj.unflatten(-1, (-1, 4)) != 0).sum(-1)
    assert int(kept.max()) == 2
    wanted = exact(x.double(), index, weights.double())
    assert (experts(x, index, weights) - wanted).norm() < 0.02 * wanted.norm()
    with pytest.raises(ValueError, match=r"quantize_: gate_up_proj of the model itself must be 2:4 for .*pruned=True"):
        lowbit.quantize_(made(), lowbit.int8_dynamic_activation_int8_semi_sparse_weight(pruned=True))


def test_no_tokens_and_none_of_their_experts() -> None:
    experts = made(bias=True)
    lowbit.quantize_(experts, lowbit.int8_weight_only())
    x, index, weights = routed()
    assert experts(x[:0], index[:0], weights[:0]).shape == (0, HIDDEN)
    assert torch.equal(experts(x, index[:, :0], weights[:, :0]), torch.zeros(TOKENS, HIDDEN))


def test_it_is_one_op_of_a_graph() -> None:
    experts = made(InTurns, bias=True).requires_grad_(False)
    lowbit.quantize_(experts, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    x, index, weights = routed()
    compiled = torch.compile(experts, fullgraph=True, backend="eager", dynamic=True)
    assert torch.equal(compiled(x, index, weights), experts(x, index, weights))
    assert torch.equal(compiled(x[:7], index[:7], weights[:7]), experts(x[:7], index[:7], weights[:7]))
    exported = torch.export.export(experts, (x, index, weights), dynamic_shapes=({0: torch.export.Dim("t")},) * 3)
    assert torch.equal(exported.module()(x[:9], index[:9], weights[:9]), experts(x[:9], index[:9], weights[:9]))
    ops = [str(node.target) for node in exported.graph.nodes if "lowbit" in str(node.target)]
    assert len(ops) == 1 and ops[0].startswith("lowbit.experts")


def test_a_graph_with_gradients_is_that_of_the_module() -> None:
    experts = made(InTurns, bias=True)
    lowbit.quantize_(experts, lowbit.int4_weight_only(group_size=32))
    x, index, weights = routed()
    found = []
    for run in (experts, torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=True)):
        given = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = run(given[0], index, given[1])
        found.append([y, *torch.autograd.grad(y.square().sum(), [*given, experts.gate_up_proj_bias, experts.down_proj_bias])])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


def test_pickles_from_before_the_op_was_called_load() -> None:
    experts = made(bias=True)
    lowbit.quantize_(experts, lowbit.int4_weight_only(group_size=32))
    del experts.__dict__["op_gate"]
    loaded = pickle.loads(pickle.dumps(experts))
    x, index, weights = routed()
    assert_within(loaded(x, index, weights), *layer_of(loaded)(x, index, weights), "by two products")
