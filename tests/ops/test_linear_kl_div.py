# SPDX-License-Identifier: Apache-2.0
"""linear_kl_div: divergences and gradients of packed and float heads against float64, blocks of rows and words, no logits
of all rows and words in memory, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit
from lowbit import testing
from lowbit.ops import linear_kl_div as module
from lowbit.reference import linear as reference_linear
from lowbit.testing import ROUNDOFF

T, V, H, TAUGHT = 13, 133, 70, 100
U = ROUNDOFF["float32"]
FLOATS = ("float32", "bfloat16", "float16")
CONFIGS: dict[str, Any] = {
    "int4": lowbit.int4_weight_only(32),
    "nf4": lowbit.nf4_weight_only(64),
    "int8": lowbit.int8_weight_only(),
    "int8 activations": lowbit.int8_dynamic_activation_int8_weight(),
}
FORMULAS: dict[str, dict[str, float]] = {
    "plain": {},
    "a temperature": {"logit_scale": 0.5, "teacher_logit_scale": 0.5},
    "caps": {"softcap": 3.0, "teacher_softcap": 2.0, "logit_scale": -1.5},
}


class Side:
    """A head, its hidden states, and the logits that float64 makes of them with the error that float32 may have."""

    def __init__(self, h: int, form: str, dtype: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(T, h, generator=generator).to(getattr(torch, dtype))
        layer = nn.Linear(h, V)
        layer.weight.data = torch.randn(V, h, generator=generator) / math.sqrt(h) * 2
        self.bias, self.stored, x_format = layer.bias.detach(), None, "float"
        if form in FLOATS:
            self.head = layer.weight.detach().to(getattr(torch, form))
            self.decoded = self.head.double()
        else:
            spec = CONFIGS[form].spec(torch.float32)
            packed = lowbit.QuantLinear.from_linear(layer, spec)
            self.head, self.stored = packed.weight, packed.stored
            self.decoded, x_format = packed.dequantize().double(), spec.x_format
        product = self.x.double() @ self.decoded.T
        if x_format != "float":  # what rounding of activations changes is no error
            whole = testing.decode_weight(self.head, V, h, "int8", 0, "symmetric")
            product = reference_linear.product(self.x.float(), whole, x_format)
        self.rounded = product - self.x.double() @ self.decoded.T
        self.error = float(((h + 12) * 2 * U * (self.x.double().abs() @ self.decoded.abs().T + self.bias.abs())).max())

    def logits(self, x: Tensor, head: Tensor, bias: Tensor, scale: float, softcap: float | None) -> Tensor:
        s = scale * (x @ head.T + bias + self.rounded)
        return softcap * (s / softcap).tanh() if softcap else s


def wanted(student: Side, teacher: Side, weight: Tensor, formula: dict[str, Any]) -> list[Tensor]:
    """Return the divergences and the gradients of their weighted sum by x, head and bias, by float64 autograd."""
    of = {"logit_scale": 1.0, "teacher_logit_scale": 1.0, "softcap": None, "teacher_softcap": None} | formula
    leaves = [value.double().clone().requires_grad_() for value in (student.x, student.decoded, student.bias)]
    s = student.logits(*leaves, of["logit_scale"], of["softcap"])
    x, head, bias = teacher.x.double(), teacher.decoded, teacher.bias.double()
    t = teacher.logits(x, head, bias, of["teacher_logit_scale"], of["teacher_softcap"])
    loss = (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)
    return [loss.detach(), *torch.autograd.grad((loss * weight).sum(), leaves)]


@pytest.fixture(params=[(256, 4096), (5, 48), (T, V + 11 & ~15)], ids=["whole", "blocks", "one block"], autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", request.param[0])
    monkeypatch.setattr(module, "_WORDS", request.param[1])


@pytest.mark.core
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("form, taught", [("int4", "float32"), ("nf4", "int8"), ("int8", "bfloat16"), ("int8 activations", "int4"),
                                          ("float32", "float32"), ("bfloat16", "int8 activations"), ("float16", "nf4")])  # fmt: skip
@pytest.mark.parametrize("dtype", FLOATS)
def test_divergences_and_gradients_are_within_budget_of_float64(dtype: str, form: str, taught: str, formula: str) -> None:
    student, teacher = Side(H, form, dtype, 1), Side(TAUGHT, taught, dtype, 2)
    weight = torch.rand(T, generator=torch.Generator().manual_seed(3)) + 0.5
    exact = wanted(student, teacher, weight, FORMULAS[formula])
    x, head, bias = student.x.clone().requires_grad_(), student.head.clone(), student.bias.clone().requires_grad_()
    head.requires_grad_(student.stored is None)
    loss = lowbit.linear_kl_div(
        x, head, teacher.x, teacher.head, student.stored, teacher.stored,
        bias=bias, teacher_bias=teacher.bias, reduction="none", **FORMULAS[formula],
    )  # fmt: skip
    (loss * weight).sum().backward()
    # A divergence moves by the logits of both; a probability by twice the s that moves most, and by its exponential.
    error = 4 * (student.error + teacher.error) + 100 * U * (1 + float(exact[0].abs().max()) + math.log(V))
    assert loss.dtype is torch.float32 and bool(((loss.double() - exact[0]).abs() <= error).all())
    magnitude = 3.0 * float(weight.max())  # of dloss / dlogit over all words: at most 2 probabilities, a slope and a scale
    sizes = [student.decoded.abs().max(), weight.sum() * student.x.double().abs().max() * 1.5, weight.sum() * 1.5]
    for name, grad, true, size in zip(("x", "head", "bias"), (x.grad, head.grad, bias.grad), exact[1:], sizes, strict=True):
        if grad is None:
            assert name == "head" and student.stored is not None
            continue
        allowed = (4 * error + (V + T) * U) * magnitude * float(size)
        rounding = ROUNDOFF[str(grad.dtype).removeprefix("torch.")] * true.abs() + 1e-7
        assert bool(((grad.double() - true).abs() <= allowed + rounding).all()), name


def test_reductions_and_shapes() -> None:
    student, teacher = Side(H, "int4", "float32", 1), Side(TAUGHT, "float32", "float32", 2)
    x = student.x.clone().requires_grad_()

    def call(reduction: str, lead: tuple[int, ...] = (T,)) -> Tensor:
        return lowbit.linear_kl_div(
            x.view(*lead, H), student.head, teacher.x.view(*lead, TAUGHT), teacher.head, student.stored, reduction=reduction
        )

    rows = call("none")
    assert call("none", (T, 1)).shape == (T, 1)
    torch.testing.assert_close(call("sum"), rows.sum(), rtol=1e-6, atol=0)
    (mean,) = torch.autograd.grad(call("mean"), x)
    (one,) = torch.autograd.grad(call("none")[4], x)
    assert bool((one[torch.arange(T) != 4] == 0).all())
    torch.testing.assert_close(mean[4] * T, one[4], rtol=1e-5, atol=1e-7)


def test_a_student_that_is_its_teacher_has_no_divergence() -> None:
    side = Side(H, "int8", "float32", 1)
    x = side.x.clone().requires_grad_()
    loss = lowbit.linear_kl_div(x, side.head, side.x, side.head, side.stored, side.stored)
    loss.backward()
    assert abs(float(loss.detach())) < 1e-6 and float(x.grad.abs().max()) < 1e-6


def test_finite_logits_of_any_size_have_a_finite_divergence() -> None:
    student, teacher = Side(H, "int4", "float32", 1), Side(TAUGHT, "float32", "float32", 2)
    x = (student.x * 1e4).requires_grad_()
    loss = lowbit.linear_kl_div(x, student.head, teacher.x * 1e4, teacher.head, student.stored)
    loss.backward()
    assert bool(loss.isfinite()) and bool(x.grad.isfinite().all())


def test_no_tensor_has_all_rows_and_words() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.numel = max([self.numel, *(o.numel() for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, Tensor))])
            return out

    rows, words, h = 300, 9000, 16
    head, taught = torch.randn(words, h, requires_grad=True), torch.randn(words, h)
    x = torch.randn(rows, h, requires_grad=True)
    with Largest() as seen:
        lowbit.linear_kl_div(x, head, x.detach(), taught).backward()
    assert seen.numel <= max(module._ROWS * module._WORDS, words * h) < rows * words


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"reduction": "batchmean"}, ValueError, "reduction must be one of mean, sum, none, got 'batchmean'"),
        ({"teacher_x": torch.ones(3, TAUGHT)}, ValueError, r"teacher_x must have the rows of x, \[13\], got \[3\]"),
        ({"x": torch.ones(T, 5)}, ValueError, r"x must have shape \[..., 70\] for this head, got \[13, 5\]"),
        ({"teacher_x": torch.ones(T, 5)}, ValueError, r"teacher_x must have shape \[..., 100\] for this teacher_head, got"),
        ({"teacher_head": torch.ones(7, TAUGHT)}, ValueError, "teacher_head must have the 133 words of head, got 7"),
        ({"stored": None}, TypeError, "stored must be a StoredWeight"),
        ({"bias": torch.ones(4)}, ValueError, r"bias must have shape \[133\], got \[4\]"),
        ({"bias": torch.ones(V).double()}, TypeError, "bias must be float32, bfloat16, float16, got torch.float64"),
        ({"x": torch.ones(T, H).double()}, TypeError, "x must be float32, bfloat16, float16, got torch.float64"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale must be finite and not 0, got 0.0"),
        ({"teacher_softcap": -1.0}, ValueError, "teacher_softcap must be positive, or None for none, got -1.0"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named(change: dict[str, Any], error: type[Exception], text: str) -> None:
    student, teacher = Side(H, "int4", "float32", 1), Side(TAUGHT, "float32", "float32", 2)
    given = {"x": student.x, "head": student.head, "teacher_x": teacher.x, "teacher_head": teacher.head, "stored": student.stored}
    with pytest.raises(error, match=f"linear_kl_div: {text}"):
        lowbit.linear_kl_div(**(given | change))


def test_derivatives_that_it_does_not_have_are_refused() -> None:
    student, teacher = Side(H, "int4", "float32", 1), Side(TAUGHT, "float32", "float32", 2)
    x = student.x.clone().requires_grad_()
    loss = lowbit.linear_kl_div(x, student.head, teacher.x, teacher.head, student.stored).square()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match="linear_kl_div"):
        torch.func.jvp(lambda x: lowbit.linear_kl_div(x, student.head, teacher.x, teacher.head, student.stored), (x.detach(),), (x.detach(),))
