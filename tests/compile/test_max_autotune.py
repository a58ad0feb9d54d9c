# SPDX-License-Identifier: Apache-2.0
"""compile_options(max_autotune=True): our kernels are among the choices, what is taken computes within the budget of
float64, and what a decision depends on is known. Times are stubs here: a test says which choice is the fastest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import lowbit
from lowbit import _C, compile_options
from lowbit.autotune.rows import fitting_rows
from lowbit.autotune.timing import Timed, Times
from lowbit.compile import options as of_options
from lowbit.compile.dense_choice import DenseChoice
from lowbit.compile.post_ops import FoldPostOps
from lowbit.compile.row_choice import RowChoice
from lowbit.ops.linear import activation_functions
from lowbit.testing import LinearCase, assert_within, make_data
from lowbit.testing.cases import ROUNDOFF, decode_weight

OURS = "torch.ops.lowbit.linear.detached("
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def _frozen() -> Iterator[None]:
    """Weights are constants, and C++ templates, which take seconds each to compile, are left out."""
    torch._dynamo.reset()
    with torch.no_grad(), config.patch(freezing=True, max_autotune_gemm_backends="ATEN"):
        yield


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let our choice take so many milliseconds. Inductor keeps times by the hash of a choice, so that is another one."""
    measured, keyed = DenseChoice.benchmark, DenseChoice.hash_key

    def take(milliseconds: float) -> None:
        def benchmark(self: DenseChoice, *args: Tensor, out: Tensor) -> float:
            return milliseconds if measured(self, *args, out=out) < float("inf") else float("inf")

        monkeypatch.setattr(DenseChoice, "benchmark", benchmark)
        monkeypatch.setattr(DenseChoice, "hash_key", lambda self: f"{keyed(self)} {milliseconds} {id(take)}")

    take(1e-9)
    return take


def compiled(function: Any, *inputs: Tensor, **how: Any) -> tuple[Any, dict[str, Any], str]:
    """The compiled function after a first call, its options, and the code that Inductor wrote."""
    options = compile_options(max_autotune=True)
    made = torch.compile(function, options=options, fullgraph=True, **how)
    _, code = run_and_get_code(made, *inputs)
    return made, options, "\n".join(code)


def layer(case: LinearCase, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(case.k, case.n, bias=bias is not None, dtype=getattr(torch, case.dtype))
    made.weight.copy_(weight)
    if bias is not None:
        made.bias.copy_(bias)
    return made


def post_ops_are_apart(dtype: str) -> bool:
    """Whether Inductor leaves post-ops of a product out of its call, as it does where oneDNN has no products of this dtype
    for the CPU: the product is rounded before them, as in eager torch."""
    short = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    return short is not None and not getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported")()


def rounding_of_product(module: nn.Linear, x: Tensor) -> Tensor:
    product = x.double() @ module.weight.double().T + (0 if module.bias is None else module.bias.double())
    return 1.13 * ROUNDOFF[str(module.weight.dtype).removeprefix("torch.")] * product.abs()  # the slope of gelu, the steepest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_float_layer_that_is_taken_is_within_the_budget(
    dtype: str, dynamic: bool, fastest: Callable[[float], None], subtests: pytest.Subtests
) -> None:
    for activation, add, bias in (
        ("none", False, None), ("relu", False, dtype), ("gelu", False, dtype), ("gelu_tanh", False, None),
        ("silu", False, dtype), ("none", True, dtype), ("none", True, None),
    ):  # fmt: skip
        case = LinearCase(6, 20, 70, dtype, dtype, bias=bias, activation=activation, add=add)
        with subtests.test(case=str(case)):
            torch._dynamo.reset()
            data, function = make_data(case), activation_functions[_C.ACTIVATIONS[activation]]
            module = layer(case, decode_weight(data.packed, 20, 70, dtype, 0, "symmetric"), data.bias)

            def run(x: Tensor, *others: Tensor) -> Tensor:
                y = function(module(x))  # noqa: B023
                return y + others[0] if others else y

            inputs = [data.x.reshape(2, 3, 70), *([data.add.reshape(2, 3, 20)] if add else [])]
            made, options, code = compiled(run, *inputs, dynamic=dynamic)
            assert OURS in code and "mkldnn._linear_pointwise.default(" not in code and "mkl_linear(" not in code
            result = made(*inputs)
            assert _C.last_kernel("linear").startswith(f"linear_{dtype}_")
            apart = (activation != "none" or add) and post_ops_are_apart(dtype)
            rounding = rounding_of_product(module, data.x) if apart else 0.0
            assert_within(result.reshape(6, 20), data.wanted, data.allowed + rounding, str(case))
            (entry,) = lowbit.explain(options).timed
            assert (entry.shape, entry.m, entry.dtype) == ("20 x 70", "6 (any)" if dynamic else "6", dtype)
            assert entry.taken == "lowbit_linear" and len(entry.microseconds) == 2 and not entry.left
            if dynamic:
                longer = [torch.cat([tensor, tensor[:1]]) for tensor in inputs]
                torch.testing.assert_close(made(*longer)[:2], result)


def test_the_faster_one_is_taken(fastest: Callable[[float], None]) -> None:
    module, x = nn.Linear(64, 48).eval(), torch.randn(5, 64)
    for milliseconds, ours in ((1e-9, True), (1e9, False)):
        torch._dynamo.reset()
        counters.clear()
        fastest(milliseconds)
        made, options, code = compiled(module, x)
        torch.testing.assert_close(made(x), module(x))
        assert (OURS in code) is ours
        assert (counters["inductor"]["select_algorithm_weight_prune"] > 0) is ours  # the weight that is not used is gone
        (entry,) = lowbit.explain(options).timed
        assert (entry.taken == "lowbit_linear") is ours
        assert dict(entry.microseconds)["lowbit_linear"] == pytest.approx(1e3 * milliseconds)
        assert f"48 x 64  5  float32  1      {entry.taken}" in repr(lowbit.explain(options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_changed_is_not_served_from_a_cache(dtype: str, fastest: Callable[[float], None]) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(64, 48, dtype=getattr(torch, dtype)).eval(), torch.randn(5, 64, dtype=getattr(torch, dtype))
    for _ in range(3):
        torch._dynamo.reset()
        made, _, code = compiled(module, x)
        assert OURS in code
        torch.testing.assert_close(made(x), module(x), rtol=2e-2, atol=2e-2)
        module.load_state_dict({name: torch.randn_like(tensor) for name, tensor in module.state_dict().items()})


def test_a_weight_that_two_layers_share_stays(fastest: Callable[[float], None]) -> None:
    first, second = nn.Linear(64, 64).eval(), nn.Linear(64, 64, bias=False).eval()
    second.weight = first.weight
    x = torch.randn(5, 64)
    made, options, code = compiled(lambda x: second(first(x)).sin() @ first.weight, x)
    assert code.count(OURS) == 3
    torch.testing.assert_close(made(x), second(first(x)).sin() @ first.weight, rtol=1e-4, atol=1e-4)
    assert len(lowbit.explain(options).timed) == 3


LEFT: dict[str, tuple[Callable[[nn.Linear, Tensor], Tensor], str]] = {
    "another post-op": (lambda m, x: nn.functional.hardswish(m(x)), "its post-op hardswish is none of ours"),
    "two inputs": (lambda m, x: x @ x.T, "its weight is no constant"),
    "not finite": (lambda m, x: m(x), "its weight holds inf or nan"),
}


@pytest.mark.parametrize("name", list(LEFT))
def test_what_cannot_be_ours_is_left_with_the_reason(name: str, fastest: Callable[[float], None]) -> None:
    function, reason = LEFT[name]
    module, x = nn.Linear(64, 64, dtype=torch.bfloat16).eval(), torch.randn(5, 64, dtype=torch.bfloat16)
    if name == "not finite":
        module.weight[0, 0] = torch.inf
    made, options, code = compiled(lambda x: function(module, x), x)
    torch.testing.assert_close(made(x), function(module, x), rtol=2e-2, atol=2e-2, equal_nan=True)
    if name == "another post-op" and post_ops_are_apart("bfloat16"):
        return  # it is no post-op of the product there, which may be ours
    assert OURS not in code
    assert any(entry.left.startswith(reason) for entry in lowbit.explain(options).timed), lowbit.explain(options)


@pytest.mark.parametrize("trained", [False, True])
def test_weights_that_are_inputs_are_left_and_explained(trained: bool, fastest: Callable[[float], None]) -> None:
    module, x = nn.Linear(64, 48), torch.randn(5, 64)
    caches = {"force_disable_caches": True}  # a graph from a cache is not looked at
    with config.patch(freezing=trained, **caches), torch.set_grad_enabled(trained):  # freezing is nothing without no_grad
        made, options, code = compiled(module, x)
        if trained:
            made(x).sum().backward()
            torch.testing.assert_close(module.weight.grad, x.sum(0).expand(48, 64))
    assert OURS not in code
    report = lowbit.explain(options)
    assert len(report.timed) == (2 if trained else 1)  # the backward has a product too
    assert all("its weight is no constant: torch._inductor.config.freezing" in it.left for it in report.timed)
    assert "48 x 64" in repr(report) and "<table" in report._repr_html_()


def test_a_forced_row_runs_or_leaves_the_layer_to_inductor(fastest: Callable[[float], None]) -> None:
    module, x = nn.Linear(64, 48).eval(), torch.randn(5, 64)
    with lowbit.force_kernel("linear_float32_scalar"):
        made, options, code = compiled(module, x)
        torch.testing.assert_close(made(x), module(x))
        assert OURS in code and _C.last_kernel("linear") == "linear_float32_scalar"
    torch._dynamo.reset()
    with lowbit.force_kernel("linear_int8_scalar"):
        made, options, code = compiled(module, x)
        torch.testing.assert_close(made(x), module(x))
        assert OURS not in code
        (entry,) = lowbit.explain(options).timed
        assert "linear_int8_scalar" in entry.left and entry.taken != "lowbit_linear"


def test_other_compilations_have_none_of_it() -> None:
    compile_options(max_autotune=True)
    module, x = nn.Linear(64, 48).eval(), torch.randn(5, 64)
    for options in ({"max_autotune": True}, compile_options() | {"max_autotune": True}):
        torch._dynamo.reset()
        _, code = run_and_get_code(torch.compile(module, options=options), x)
        assert "lowbit" not in "\n".join(code)
        assert config.max_autotune is False and config.post_grad_custom_pre_pass is None


def test_caches_know_what_a_decision_depends_on() -> None:
    threads = torch.get_num_threads()
    owner = FoldPostOps(max_autotune=True)
    assert owner.uuid() is None  # a graph with a frozen weight is not kept
    with config.patch(freezing=False):
        known = {FoldPostOps().uuid(), owner.uuid()}
        assert len(known) == 2 and owner.uuid() == FoldPostOps(max_autotune=True).uuid()
        with lowbit.force_kernel("linear_int8_scalar"):
            known.add(owner.uuid())
        torch.set_num_threads(threads + 1)
        try:
            known.add(owner.uuid())
        finally:
            torch.set_num_threads(threads)
        assert len(known) == 4 and None not in known and owner.uuid() in known


def test_inductor_keeps_our_times_by_all_that_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []

    def benchmark(self: DenseChoice, *args: Tensor, out: Tensor) -> float:
        keys.append(self.hash_key())
        return 1e-9

    monkeypatch.setattr(DenseChoice, "benchmark", benchmark)
    module, x, threads = nn.Linear(64, 48).eval(), torch.randn(5, 64), torch.get_num_threads()

    def key() -> str:
        torch._dynamo.reset()
        compiled(module, x)
        return keys[-1]

    with config.patch(autotune_local_cache=False):
        known = [key(), key()]
        assert known[0] == known[1] and _C.version in known[0] and _C.isa()["chosen"] in known[0]
        with lowbit.force_kernel("linear_float32_scalar"):
            known.append(key())
        torch.set_num_threads(threads + 1)
        try:
            known.append(key())
        finally:
            torch.set_num_threads(threads)
    assert len(keys) == 4 and len(set(known)) == 3


class StubTimer:
    """Gives every row a second, one of them less."""

    def __init__(self, fastest: str = "", noise: float = 1.0) -> None:
        self.fastest, self.noise, self.asked = fastest, noise, 0

    def best(self, calls: dict[str, Timed], share: float) -> Times[str]:
        self.asked += 1
        for timed in calls.values():
            timed.call()
        return Times({name: 0.5 if name == self.fastest else 1.0 for name in calls}, self.noise)


def quantized(row: str = "") -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64), nn.Linear(64, 48)).eval()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_weight())
    for module in model:
        if row and isinstance(module, lowbit.QuantLinear):
            module.prefer(row)
    return model


def with_timer(model: nn.Module, timer: StubTimer, x: Tensor, **how: Any) -> tuple[Any, dict[str, Any]]:
    options = compile_options(max_autotune=True)
    options["post_grad_custom_pre_pass"].rows = RowChoice(timer)
    made = torch.compile(model, options=options, **how)
    made(x)
    return made, options


@pytest.mark.parametrize("dynamic", [False, True])
def test_quantized_layers_prefer_the_fastest_row(dynamic: bool) -> None:
    torch.manual_seed(0)
    model, x = quantized(), torch.randn(5, 64)
    rows = fitting_rows(5, *model[0].op_args, "float32", "cpu")
    if len(rows) < 2:
        pytest.skip("this machine has one row for the call")
    timer = StubTimer(rows[1])
    made, options = with_timer(model, timer, x, dynamic=dynamic)
    torch.testing.assert_close(made(x), model(x), rtol=1e-2, atol=1e-2)
    made(x)
    assert _C.last_kernel("linear") == rows[1]
    report = lowbit.explain(options)
    assert [entry.taken for entry in report.timed] == [rows[1]] * 3
    assert timer.asked == 2 and report.timed[0].m == ("5 (any)" if dynamic else "5")  # two shapes
    assert dict(report.timed[0].microseconds) == {row: 5e5 if row == rows[1] else 1e6 for row in rows}


def test_a_row_that_wins_less_than_the_noise_is_not_taken() -> None:
    model, x = quantized(), torch.randn(5, 64)
    rows = fitting_rows(5, *model[0].op_args, "float32", "cpu")
    if len(rows) < 2:
        pytest.skip("this machine has one row for the call")
    _, options = with_timer(model, StubTimer(rows[1], noise=3.0), x)
    assert _C.last_kernel("linear") == rows[0]
    assert {entry.taken for entry in lowbit.explain(options).timed} == {rows[0]}


def test_preferred_and_forced_rows_stay() -> None:
    x, timer = torch.randn(5, 64), StubTimer()
    _, options = with_timer(quantized("linear_int8_int8_scalar"), timer, x)
    assert _C.last_kernel("linear") == "linear_int8_int8_scalar"
    assert {entry.left for entry in lowbit.explain(options).timed} == {"the layer prefers a row already"}
    torch._dynamo.reset()
    with lowbit.force_kernel("linear_int8_int8_scalar"):
        _, options = with_timer(quantized(), timer, x)
    assert {entry.left for entry in lowbit.explain(options).timed} == {"linear_int8_int8_scalar is forced"}
    assert timer.asked == 0


def test_max_autotune_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="compile_options: max_autotune must be a bool, got str"):
        compile_options(max_autotune="max-autotune")


def test_a_torch_without_the_hook_says_so_once_and_float_layers_keep_inductors_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_options, "_DENSE_HOOK", "a_hook_that_torch_does_not_have")
    monkeypatch.setattr(of_options, "_said", set())
    with pytest.warns(UserWarning, match="has no a_hook_that_torch_does_not_have; float layers keep Inductor's choices"):
        assert compile_options(max_autotune=True)["max_autotune"] is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_options(max_autotune=True)


def test_torch_logs_show_what_was_taken(python: Callable[..., str]) -> None:
    code = """
import os
os.dup2(1, 2)  # stderr is stdout
import torch, lowbit
from torch._inductor import config
model, x = torch.nn.Linear(64, 48), torch.randn(5, 64)
with torch.no_grad(), config.patch(freezing=True, max_autotune_gemm_backends="ATEN", autotune_local_cache=False):
    torch.compile(model, options=lowbit.compile_options(max_autotune=True))(x)
"""
    shown = python(code, TORCH_LOGS="lowbit.compile")
    assert "lowbit_linear" in shown and "AUTOTUNE packed_linear(5x64" in shown
    assert "max_autotune: " in shown and "TimedProduct(shape='48 x 64', m='5'" in shown


@pytest.mark.parametrize("bias", [False, True])
def test_where_onednn_takes_no_bfloat16_the_choice_beside_aten_is_ours(python: Callable[..., str], bias: bool) -> None:
    code = f"""
import torch, lowbit
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from lowbit.compile import dense_choice
measured = dense_choice.DenseChoice.benchmark
dense_choice.DenseChoice.benchmark = lambda self, *args, out: 1e-9 * measured(self, *args, out=out)
model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias={bias}), torch.nn.ReLU()).bfloat16()
options = lowbit.compile_options(max_autotune=True)
with torch.no_grad(), config.patch(freezing=True, max_autotune_gemm_backends="ATEN", autotune_local_cache=False):
    for m in (1, 5):
        x = torch.randn(m, 64, dtype=torch.bfloat16)
        compiled = torch.compile(model, options=options, dynamic=False)
        result, (source,) = run_and_get_code(compiled, x)
        wanted = model.double()(x.double())
        model.bfloat16()
        torch.testing.assert_close(result.double(), wanted, rtol=2**-7, atol=2**-7)
        print("ours" if {OURS!r} in source else "not ours")
print([(entry.m, entry.taken, [name for name, _ in entry.microseconds]) for entry in options["post_grad_custom_pre_pass"].report.timed])
"""
    shown = python(code, ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2")
    assert shown.splitlines()[-3:-1] == ["ours", "ours"], shown
    kind = "addmm" if bias else "mm"
    assert f"('5', 'lowbit_linear', ['lowbit_linear', '{kind}'])" in shown, shown
