# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy: losses and gradients of every row and format against float64, what depends on nothing else
(threads, other rows, ignored rows), reductions, and what it refuses."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from torch import Tensor, nn

import lowbit
from lowbit import _C, testing
from lowbit.reference import linear as reference_linear
from lowbit.reference import linear_cross_entropy as reference
from lowbit.testing import ROUNDOFF, LinearCase, assert_within

op = torch.ops.lowbit.linear_cross_entropy
loss_row = fixture_of(testing.rows("linear_cross_entropy"))
FLOATS = ("float32", "bfloat16", "float16")
PACKED = [of for of in testing.format_cases() if of[1] in (0, 16, 32, 64)]
PLAIN: dict[str, float] = {}
OPTIONS: dict[str, dict[str, float]] = {
    "plain": PLAIN,
    "all": {"scale": 0.7, "softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.01},
    "softcap": {"softcap": 3.0},
    "smoothing and z_loss": {"label_smoothing": 0.2, "z_loss": 0.1},
    "a negative scale": {"scale": -1.5},
}
SHAPES = {"a row": (1, 37, 70), "few rows": (5, 300, 132), "blocks and ranges": (150, 277, 100), "one word": (3, 1, 1)}


def call_of(of: tuple[str, int, str, str], n: int, k: int) -> tuple[int, int, int, int, bool, int]:
    format, group_size, mapping, x_format = of
    return LinearCase(1, n, k, "float32", format, group_size, mapping, x_format).op_args


def labels_of(t: int, n: int) -> Tensor:
    labels = torch.randint(0, n, (t,), generator=torch.Generator().manual_seed(t))
    labels[1::4] = -100
    return labels


class Problem:
    """x, a head, what it decodes to, labels and weights of rows; the logits in float64 and the errors they may have."""

    def __init__(self, shape: str, of: tuple[str, int, str, str], dtype: str, packed: bool = True) -> None:
        t, n, k = SHAPES[shape]
        generator = torch.Generator().manual_seed(t)
        self.dtype, self.packed = getattr(torch, dtype), packed
        self.x = torch.randn(t, k, generator=generator).to(self.dtype)
        weight, self.bias = torch.randn(n, k, generator=generator) / math.sqrt(k) * 2, torch.randn(n)
        format, group_size, mapping, x_format = of
        if packed:
            self.head = testing.pack_weight(weight, format, group_size, mapping)
            decoded = testing.decode_weight(self.head, n, k, format, group_size, mapping)
        else:
            decoded = self.head = weight.to(getattr(torch, format))
        self.args = call_of(of, n, k)
        self.decoded = decoded.double() if isinstance(decoded, Tensor) else decoded.decode()
        self.labels, self.row_weight = labels_of(t, n), torch.rand(t, generator=generator) + 0.5
        if packed:
            product = reference_linear.product(self.x, decoded, x_format)
            magnitude = reference_linear.magnitude(self.x, decoded, x_format)
        else:
            product, magnitude = self.x.double() @ decoded.double().T, self.x.double().abs() @ decoded.double().abs().T
        self.logits = product + self.bias.double()
        self.allowed = (k + 9) * reference.U * (magnitude + self.bias.double().abs())

    def call(self, options: dict[str, float], *gradients: bool) -> tuple[Tensor, ...]:
        of = {"scale": 1.0, "softcap": 0.0, "label_smoothing": 0.0, "z_loss": 0.0} | options
        row_weight = self.row_weight if any(gradients) else None
        return op(self.x, self.head, self.labels, *self.args, self.bias, row_weight, -100, *of.values(), *gradients)

    def check(self, options: dict[str, float], what: str) -> None:
        wanted = reference.linear_cross_entropy(self.logits, self.labels, **options)
        errors = reference.allowed_losses(wanted, self.logits, self.allowed, **options)
        loss, lse, *none = self.call(options)
        assert [tensor.numel() for tensor in none] == [0, 0, 0]
        loss_too, lse_too, of_x, of_head, of_bias = self.call(options, True, not self.packed, True)
        assert loss.equal(loss_too) and lse.equal(lse_too) and loss.dtype == lse.dtype == torch.float32
        assert_within(loss, wanted.loss, errors[0], f"loss {what}")
        assert_within(lse, wanted.lse, errors[1], f"lse {what}")
        gradients, allowed = reference.gradients(
            self.x, self.decoded, self.labels, wanted, errors[2], self.row_weight, **options
        )
        assert of_x.dtype == self.dtype and of_bias.dtype == self.bias.dtype
        within_rounding(of_x, gradients.x, allowed.x, f"x {what}")
        within_rounding(of_bias, gradients.bias, allowed.bias, f"bias {what}")
        if self.packed:
            assert of_head.numel() == 0
        else:
            assert of_head.dtype == self.head.dtype
            within_rounding(of_head, gradients.head, allowed.head, f"head {what}")


def within_rounding(actual: Tensor, wanted: Tensor, allowed: Tensor, what: str) -> None:
    u, smallest = ROUNDOFF[str(actual.dtype).removeprefix("torch.")], torch.finfo(actual.dtype).smallest_normal
    assert_within(actual, wanted, allowed + u * (wanted.abs() + allowed + smallest), what)


problem = functools.cache(Problem)


@pytest.mark.core
def test_every_row_and_format_is_within_budget_of_float64(loss_row: str, subtests: pytest.Subtests) -> None:
    served = 0
    for number, of in enumerate(PACKED):
        shape, options = list(SHAPES)[number % 3], list(OPTIONS)[number % len(OPTIONS)]
        if of[0].endswith("semi_sparse") and SHAPES[shape][2] % 4:
            shape = "few rows"
        case = problem(shape, of, FLOATS[number % 3])
        try:
            with lowbit.force_kernel(loss_row):
                case.call(PLAIN)
        except NotImplementedError:
            continue
        served += 1
        with subtests.test(of=of, shape=shape, options=options), forced(loss_row):
            case.check(OPTIONS[options], f"{loss_row} {of} {shape} {options}")
    assert served


@pytest.mark.core
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_float_head_gets_its_gradient(dtype: str, shape: str, options: str) -> None:
    for format in FLOATS:
        case = problem(shape, (format, 0, "symmetric", "float"), dtype, False)
        case.check(OPTIONS[options], f"{format} {shape} {options}")


@pytest.mark.parametrize("of", [("int8", 0, "symmetric", "int8_row"), ("int4", 32, "symmetric", "float")], ids=str)
def test_the_number_of_threads_changes_no_bit(of: tuple[str, int, str, str]) -> None:
    k = 64
    x, weight, labels = torch.randn(300, k), torch.randn(3000, k), labels_of(300, 3000)
    packed, weights = testing.pack_weight(weight, of[0], of[1], of[2]), torch.rand(300)
    same_for_any_threads(lambda: op(x, packed, labels, *call_of(of, 3000, k), None, weights, grad_x=True))
    args = call_of(("float32", 0, "symmetric", "float"), 3000, k)
    same_for_any_threads(lambda: op(x[:9], weight, labels[:9], *args, None, weights[:9], grad_x=True, grad_head=True))


def test_rows_without_a_label_are_not_computed_and_a_row_with_nan_is_alone() -> None:
    case = problem("blocks and ranges", ("bfloat16", 0, "symmetric", "float"), "float32", False)
    wanted = case.call(PLAIN, True)
    x, skipped = case.x.clone(), case.labels == -100
    x[skipped] = torch.nan
    other = Problem("blocks and ranges", ("bfloat16", 0, "symmetric", "float"), "float32", False)
    other.bias, other.x = case.bias, x
    for mine, theirs in zip(other.call(PLAIN, True), wanted, strict=True):
        assert mine.equal(theirs)
    assert not wanted[0][skipped].any() and not wanted[1][skipped].any() and not wanted[2][skipped].any()
    x[10], others = torch.nan, torch.arange(len(x)) != 10
    assert not skipped[10]
    for mine, theirs in zip(other.call(PLAIN, True)[:3], wanted, strict=False):
        assert mine[10].isnan().all() and mine[others].equal(theirs[others])


@pytest.mark.parametrize("factor", [1e4, 1e8, 1e30])
def test_extreme_logits_have_finite_losses(factor: float) -> None:
    x, weight = torch.randn(20, 32) * factor, torch.randn(500, 32).requires_grad_()
    labels = torch.randint(0, 500, (20,))
    x.requires_grad_()
    loss = lowbit.linear_cross_entropy(x, weight, labels, reduction="none")
    wanted = nn.functional.cross_entropy(x.double() @ weight.double().T, labels, reduction="none")
    spread = (x.double().abs() @ weight.double().abs().T).amax(-1)
    assert_within(loss.detach(), wanted.detach(), (2 * 41 * reference.U * spread + 1e-5).detach(), f"{factor}")
    loss.sum().backward()
    assert x.grad is not None and weight.grad is not None and x.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions_and_gradients_are_those_of_torchs_cross_entropy(dtype: str, reduction: str) -> None:
    of = getattr(torch, dtype)
    x, weight, bias = (torch.randn(*shape).to(of) for shape in ((2, 9, 40), (150, 40), (150,)))
    labels = labels_of(18, 150).view(2, 9)
    factor = torch.rand(2, 9) if reduction == "none" else torch.tensor(3.0)
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in (x, weight, bias)] for _ in range(2))
    loss = lowbit.linear_cross_entropy(ours[0], ours[1], labels, bias=ours[2], reduction=reduction, label_smoothing=0.1)
    assert loss.dtype is torch.float32
    (loss * factor).sum().backward()
    logits = (theirs[0].double() @ theirs[1].double().T + theirs[2].double()).flatten(0, 1)
    wanted = nn.functional.cross_entropy(logits, labels.flatten(), reduction=reduction, label_smoothing=0.1)
    wanted = wanted.view(labels.shape) if reduction == "none" else wanted
    (wanted * factor).sum().backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None and mine.grad.dtype is of
        scale = other.grad.float().abs().max()
        torch.testing.assert_close(mine.grad.float(), other.grad.float(), rtol=4 * ROUNDOFF[dtype], atol=float(scale) * 2e-5)  # fmt: skip


def test_gradients_of_a_float16_mean_do_not_underflow() -> None:
    """As a gradient scaler multiplies the loss: a thousandth of these gradients is subnormal in float16."""
    x, weight = torch.randn(2000, 32).half().requires_grad_(), torch.randn(200, 32) * 1e-2
    labels = torch.randint(0, 200, (2000,))
    (lowbit.linear_cross_entropy(x, weight.half(), labels) * 2048).backward()
    wide = x.detach().double().requires_grad_()
    (nn.functional.cross_entropy(wide @ weight.half().double().T, labels) * 2048).backward()
    assert x.grad is not None and wide.grad is not None
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=2e-3, atol=1e-5)


def test_no_label_at_all() -> None:
    x, weight = torch.randn(4, 32, requires_grad=True), torch.randn(50, 32, requires_grad=True)
    labels = torch.full((4,), -100)
    assert lowbit.linear_cross_entropy(x, weight, labels).isnan()
    lowbit.linear_cross_entropy(x, weight, labels, reduction="sum").backward()
    assert x.grad is not None and weight.grad is not None and not x.grad.any() and not weight.grad.any()
    assert lowbit.linear_cross_entropy(x[:0], weight, labels[:0], reduction="none").shape == (0,)


def test_log_probabilities_of_a_packed_layer_and_another_ignore_index() -> None:
    layer = nn.Linear(64, 130)
    model = nn.Sequential(layer)
    lowbit.quantize_(model, lowbit.int8_weight_only())
    packed, x, labels = model[0], torch.randn(3, 7, 64), torch.randint(0, 130, (3, 7))
    with torch.no_grad():
        loss, lse = lowbit.linear_cross_entropy(
            x, packed.weight, labels, packed.stored, packed.bias, reduction="none", ignore_index=-1, return_lse=True
        )
        logits = packed(x)
    torch.testing.assert_close(
        -loss, logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_only_what_requires_a_gradient_gets_one_and_a_second_derivative_is_refused() -> None:
    x, weight, labels = torch.randn(5, 32), torch.randn(40, 32), torch.randint(0, 40, (5,))
    bias = torch.randn(40, requires_grad=True)
    loss = lowbit.linear_cross_entropy(x, weight, labels, bias=bias)
    (grad,) = torch.autograd.grad(loss, bias, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad|once_differentiable"):
        torch.autograd.grad(grad.sum(), bias)
    assert not lowbit.linear_cross_entropy(x, weight, labels).requires_grad


def arguments(**other: Any) -> tuple[Any, ...]:
    given = {
        "x": torch.randn(5, 32), "head": torch.randn(40, 32), "labels": torch.randint(0, 40, (5,)), "n": 40, "k": 32,
        "format": _C.FORMATS["float32"], "group_size": 0, "asymmetric": False, "x_format": 0, "bias": torch.randn(40),
        "row_weight": torch.rand(5), "ignore_index": -100, "scale": 1.0, "softcap": 0.0, "label_smoothing": 0.0,
        "z_loss": 0.0, "grad_x": True, "grad_head": True, "grad_bias": True,
    }  # fmt: skip
    return tuple((given | other).values())


@pytest.mark.parametrize(
    "other, error, text",
    [
        ({"x": torch.randn(5, 31)}, ValueError, r"x must have shape \[T, k\] with k=32 of the head, got \[5, 31\]"),
        ({"x": torch.randn(5, 32).double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
        ({"head": torch.randn(40, 32).double()}, TypeError, "head must be packed uint8, or float32, bfloat16 or"),
        ({"head": torch.randn(41, 32)}, ValueError, "head must have"),
        ({"head": torch.randn(40, 32).bfloat16()}, ValueError, "format must be that of the dtype of a float head"),
        ({"labels": torch.zeros(5)}, TypeError, "labels must be int64, got float32"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, ValueError, "labels must have"),
        ({"bias": torch.randn(41)}, ValueError, "bias must have"),
        ({"row_weight": torch.rand(5).double()}, TypeError, "row_weight must be float32, got float64"),
        ({"row_weight": None}, ValueError, "row_weight must be given where a gradient is wanted"),
        ({"bias": None}, ValueError, "bias must be given where its gradient is wanted"),
        ({"scale": 0.0}, ValueError, "scale must be finite and not 0, got 0"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive, or 0 for none, got -1"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be 0 to 1, got 1.5"),
        ({"z_loss": -1.0}, ValueError, "z_loss must be finite and not negative, got -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_argument_is_named_with_data_and_without(
    other: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"linear_cross_entropy: {text}"):
        op(*arguments(**other))
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(error, match=f"linear_cross_entropy: {text}"):
        op(*(mode.from_tensor(value) if isinstance(value, Tensor) else value for value in arguments(**other)))


@pytest.mark.parametrize("label", [40, -1, 2**40])
def test_a_label_outside_of_the_vocabulary_is_named(label: int) -> None:
    labels = torch.tensor([3, label, 5, 7, 1])
    with pytest.raises(ValueError, match=rf"labels must be 0 to 39, or -100 .*, got labels\[1\] = {label}"):
        op(*arguments(labels=labels))


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"reduction": "max"}, ValueError, "reduction must be one of mean, sum, none, got 'max'"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive, or None for none, got 0.0"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, ValueError, "labels must have the shape of x without"),
        ({"stored": "int8"}, TypeError, "stored must be None for a head that is not packed"),
        ({"head": torch.zeros(3, 4, dtype=torch.uint8)}, TypeError, "stored must be a StoredWeight"),
        ({"head": torch.zeros(3, 4, dtype=torch.int8)}, TypeError, "head must be packed uint8, or float32"),
    ],
    ids=str,
)
def test_a_bad_option_is_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"x": torch.randn(5, 32), "head": torch.randn(40, 32), "labels": torch.zeros(5, dtype=torch.int64)}
    with pytest.raises(error, match=f"linear_cross_entropy: {text}"):
        lowbit.linear_cross_entropy(**given | options)


def test_opcheck() -> None:
    torch.library.opcheck(op.default, arguments())
    torch.library.opcheck(
        op.default, arguments(bias=None, row_weight=None, grad_x=False, grad_head=False, grad_bias=False)
    )


def test_compiled_steps_have_the_losses_and_gradients_of_eager_ones() -> None:
    x, weight, labels = torch.randn(6, 32), torch.randn(40, 32), labels_of(6, 40)

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return lowbit.linear_cross_entropy(x, weight, labels, softcap=4.0)

    made = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        given = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = run(*given)
        loss.backward()
        made.append((loss, *(tensor.grad for tensor in given)))
    for mine, theirs in zip(*made, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_tangents_are_refused() -> None:
    weight, labels = torch.randn(40, 32), torch.randint(0, 40, (5,))
    with pytest.raises(NotImplementedError, match="linear_cross_entropy"):
        torch.func.jvp(lambda x: lowbit.linear_cross_entropy(x, weight, labels), (torch.randn(5, 32),), (torch.ones(5, 32),))  # fmt: skip
