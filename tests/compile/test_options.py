# SPDX-License-Identifier: Apache-2.0
"""lowbit.compile_options: what follows a linear op is in the op and gone from the graph, and results stay within the budget of float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import lowbit
from lowbit import _C, compile_options
from lowbit.compile import options as of_options
from lowbit.compile.post_ops import FoldPostOps
from lowbit.ops.linear import activation_functions, linear
from lowbit.testing import LinearCase, assert_within, make_data

LINEAR = torch.ops.lowbit.linear.detached
ACTIVATIONS = list(_C.ACTIVATIONS)


class Watched(FoldPostOps):
    """The pass, and the calls of each graph that it leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[fx.Node]] = []

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        graph.lint()
        self.calls.append([node for node in graph.nodes if node.op == "call_function"])

    def uuid(self) -> None:
        return None  # a graph from Inductor's cache would not be seen


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **how: Any) -> tuple[Callable[..., Any], Watched]:
    watched = Watched()
    return torch.compile(function, fullgraph=True, options={"post_grad_custom_pre_pass": watched}, **how), watched


def targets(watched: Watched) -> list[Any]:
    (calls,) = watched.calls
    return [call.target for call in calls]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_whole_chain_is_one_node_and_within_the_budget(activation: str, dtype: str, subtests: pytest.Subtests) -> None:
    case = LinearCase(6, 20, 70, dtype, "int8", 0, "symmetric", "int8_row", dtype, activation, True, True)
    data, function = make_data(case), activation_functions[_C.ACTIVATIONS[activation]]

    def chain(x: Tensor, bias: Tensor, mul: Tensor, add: Tensor) -> Tensor:
        return function(linear(x, data.packed, case.op_args) + bias) * mul + add

    for shape in ((6,), (3, 2)):
        for dynamic in (False, True):
            with subtests.test(shape=shape, dynamic=dynamic):
                torch._dynamo.reset()
                fused, watched = compiled(chain, dynamic=dynamic)
                x, mul, add = (tensor.reshape(*shape, -1).clone() for tensor in (data.x, data.mul, data.add))
                result = fused(x, data.bias, mul, add)
                assert targets(watched) == [LINEAR], watched.calls
                assert_within(result.reshape(6, 20), data.wanted, data.allowed, f"{case} {shape} {dynamic}")
                again = fused(*(tensor.repeat(2, *[1] * (len(shape))) if tensor is not data.bias else tensor for tensor in (x, data.bias, mul, add)))
                assert torch.equal(again[:1], result[:1])
                assert len(watched.calls) == (1 if dynamic else 2)  # one graph for all sizes


@pytest.mark.parametrize("config", ["int8_dynamic_activation_int8_weight", "int8_dynamic_activation_int4_weight", "int4_weight_only", "nf4_weight_only"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_mlp_is_three_nodes_and_computes_what_the_fused_one_does(config: str, activation: str) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(64, 96, bias=False), nn.Linear(96, 64)
            self.act_fn = activation_functions[_C.ACTIVATIONS[activation]]

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(2, 5, 64)
    lowbit.quantize_(model, getattr(lowbit, config)())
    fused, watched = compiled(lambda x: x + model(x))
    with torch.no_grad():
        result = fused(x)
        assert lowbit.fuse_gated_mlps(model) == [""]
        torch.testing.assert_close(result, x + model(x), rtol=0, atol=1e-2)  # an int8 activation may round to its neighbour
    assert targets(watched) == [LINEAR] * 3
    assert [entry.folded for entry in watched.report] == ["", f"{activation}, mul", "add"]


def layer() -> lowbit.QuantLinear:
    model = nn.Sequential(nn.Linear(64, 64))
    lowbit.quantize_(model, lowbit.int8_weight_only())
    return model[0].requires_grad_(False)


MISFITS: dict[str, tuple[Callable[[nn.Module, Tensor], Any], int, str]] = {
    "read twice": (lambda m, x: (y := m(x), functional.relu(y)), 1, "relu: the result is read elsewhere too"),
    "another shape": (lambda m, x: m(x) * x[:, :1], 1, "mul: it is none of the chain, or the other tensor has another shape, dtype or layout"),
    "a number": (lambda m, x: m(x) * 3.0, 1, "mul: it is none of the chain"),
    "scaled": (lambda m, x: torch.add(m(x), x, alpha=2), 1, "add: it is none of the chain"),
    "another order": (lambda m, x: functional.relu(m(x) + x), 1, ""),
    "twice": (lambda m, x: m(x) * x * x.sin(), 1, "mul: the chain has one already"),
    "strides": (lambda m, x: m(x) + x.T, 1, "add: it is none of the chain, or the other tensor has another shape, dtype or layout"),
    "a cast": (lambda m, x: m(x).double(), 1, "cast: the result has the dtype of x"),
    "squared": (lambda m, x: (lambda y: y * y)(m(x)), 1, "mul: it is none of the chain"),
    "another activation": (lambda m, x: torch.sigmoid(m(x)), 1, ""),
    "casts around it": (lambda m, x: functional.silu(m(x.half()).float()).bfloat16(), 1, "cast: the result has the dtype of x"),
    "wider": (lambda m, x: m(x) + x.double(), 1, "add: it is none of the chain"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", list(MISFITS))
def test_what_does_not_fit_is_left_alone_and_told(misfit: str) -> None:
    torch.manual_seed(0)
    function, count, told = MISFITS[misfit]
    module, x = layer(), torch.randn(64, 64)
    fused, watched = compiled(lambda x: function(module, x))
    wanted, result = function(module, x), fused(x)
    for got, want in zip(*((y if isinstance(y, tuple) else (y,)) for y in (result, wanted)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert targets(watched).count(LINEAR) >= count and len(targets(watched)) > 1 or misfit == "another order"
    left = watched.report[-1].left
    assert left.startswith(told) and bool(told) == bool(left), watched.report


def test_training_graphs_keep_what_the_backward_reads() -> None:
    torch.manual_seed(0)
    module, x = layer(), torch.randn(5, 64, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return (functional.silu(module(x)) * x + x).square().sum()

    fused, watched = compiled(loss)
    got, want = torch.autograd.grad(fused(x), x), torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(watched.calls) == 2


def test_explain_lists_what_was_folded() -> None:
    module, options = layer(), compile_options()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(lambda x: functional.relu(module(x)), options=options)(torch.randn(5, 64))
    report = lowbit.explain(options)
    assert [(entry.shape, entry.folded, entry.left) for entry in report] == [("64 x 64", "relu", "")]
    assert "64 x 64  float32  1      relu" in repr(report) and "<table" in report._repr_html_()
    assert "no quantized linear layer" in repr(lowbit.explain(compile_options()))
    with pytest.raises(TypeError, match="explain: module must be a torch.nn.Module, got dict"):
        lowbit.explain({})


def test_blocks_with_equal_options_are_one_graph() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6))).eval().requires_grad_(False)
    lowbit.quantize_(model, lowbit.int8_weight_only())
    x, options = torch.randn(3, 32), compile_options()
    wanted = model(x)
    before = torch._inductor.config.post_grad_custom_pre_pass
    assert len(lowbit.compile_blocks(model, options=options)) == 6
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(model(x), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._inductor.config.post_grad_custom_pre_pass is before is None


def test_inductors_cache_knows_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    uuid = FoldPostOps().uuid()
    assert uuid and uuid == FoldPostOps().uuid()
    monkeypatch.setattr(torch, "__version__", "another")
    assert FoldPostOps().uuid() != uuid


def test_a_torch_without_the_hook_says_so_once_and_runs_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_options, "_HOOK", "a_pass_that_torch_does_not_have")
    monkeypatch.setattr(of_options, "_said", set())
    with pytest.warns(UserWarning, match="has no a_pass_that_torch_does_not_have; models are compiled, nothing is folded"):
        options = compile_options()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_options() == options == {}
    module, x, counter = layer(), torch.randn(5, 64), CompileCounterWithBackend("inductor")
    torch.testing.assert_close(torch.compile(module, options=options)(x), module(x))
    assert counter.frame_count == 0


def test_a_pass_of_somebody_else_is_not_replaced() -> None:
    with (
        torch._inductor.config.patch(post_grad_custom_pre_pass=Watched()),
        pytest.raises(ValueError, match="compile_options: torch._inductor.config.post_grad_custom_pre_pass must be None"),
    ):
        compile_options()
