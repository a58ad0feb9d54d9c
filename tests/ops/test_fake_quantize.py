# SPDX-License-Identifier: Apache-2.0
"""fake_quantize, its backward, and fake_quantize_activations: every row bit for bit what quantizing gives, gradients
against float64, what is refused with and without data, torch's checks of the registration."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.formats.spec import LinearSpec
from lowbit.ops.fake_quantize import fake_quantize_activations, fake_quantize_weight, quantize_weight
from lowbit.quant.packing import pack_weight
from lowbit.reference import activations as reference_activations
from lowbit.reference import quantize as reference_weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = [name for name in testing.dense_formats() if _C.FORMAT_FACTS[name]["kind"] != "float"]
SPECS = [
    LinearSpec(format, group_size, mapping == "asymmetric", mapping=mapping, scale="absmax")
    for format, group_size in itertools.product(FORMATS, (0, 32, 128))
    for mapping in (_C.MAPPINGS if _C.FORMAT_FACTS[format]["kind"] == "integer" else ("symmetric",))
]
X_FORMATS = [name for name in _C.X_FORMATS if name != "float"]


def rows_of(op: str) -> list[str]:
    return [str(row["name"]) for row in testing.rows(op) if row["available"]]


def weight_of(n: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different size; one is all zeros, and one group of another."""
    weight = torch.randn(n, k) * torch.logspace(-3, 2, n)[:, None]
    weight[0], weight[-1, :32] = 0, 0
    return weight.to(dtype)


@pytest.mark.core
@pytest.mark.parametrize("row", rows_of("fake_quantize"))
def test_every_row_gives_the_weight_that_quantize_packs(row: str, subtests: pytest.Subtests) -> None:
    sizes = [(3, 1), (17, 33), (5, 160), (40, 257), (300, 1024)]  # the last is large enough for several threads
    for spec, dtype, (n, k) in zip(SPECS * 2, itertools.cycle(DTYPES), itertools.cycle(sizes), strict=False):
        with subtests.test(spec=spec.name, dtype=dtype, n=n, k=k):
            weight = weight_of(n, k, dtype)
            previous = _C.force_kernel(row)
            try:
                out = fake_quantize_weight(weight, spec.fake_quantize_args)
                codes, scale, zero = quantize_weight(weight, spec.fake_quantize_args)
            finally:
                _C.force_kernel(previous)
            assert _C.last_kernel("fake_quantize") == row and out.dtype == dtype
            packed = lowbit.QuantLinear.from_packed(pack_weight(weight, spec)[0], n, k, spec)
            assert torch.equal(out, packed.dequantize(dtype)), spec
            assert all(map(torch.equal, (codes, scale, zero), packed.unpack())), spec
            wanted = reference_weights.quantize(weight, spec.format, spec.group_size, spec.mapping)
            assert torch.equal(out, wanted.decode().float().to(dtype)), spec


def gradients_of(weight: Tensor, grad: Tensor, scale: Tensor, zero: Tensor, spec: LinearSpec) -> tuple[Tensor, ...]:
    """In float64, from the quotients of the kernel: gradients of weight and scale, and what an error of the second is
    proportional to."""
    k = weight.shape[1]
    scale, zero = (part.repeat_interleave(spec.group_size or k, 1)[:, :k] for part in (scale, zero))
    ratio = weight.float() / torch.where(scale != 0, scale, 1)
    if _C.FORMAT_FACTS[spec.format]["kind"] == "integer":
        most = _C.FORMAT_FACTS[spec.format]["code_max"]
        code = torch.round(ratio + zero)
        inside, level = (code >= 0) & (code <= most), code.clamp(0, most).double()
    else:
        levels = reference_weights.LEVELS[spec.format].double()
        inside = ratio.abs() <= reference_weights.largest_level(spec.format) * (1 + 2.0**-10)
        level = levels[reference_weights.nearest_codes(ratio, spec.format).int()]
    inner = torch.where(inside, ratio, 0).double()
    terms, sizes = (
        grad.double() * (level - zero - inner),
        grad.double().abs() * (level.abs() + zero.abs() + inner.abs()),
    )
    parts = [torch.stack([part.sum(1) for part in of.split(spec.group_size or k, 1)], 1) for of in (terms, sizes)]
    return torch.where(inside, grad, 0), *parts


@pytest.mark.core
@pytest.mark.parametrize("row", rows_of("fake_quantize_backward"))
def test_every_row_gives_the_straight_through_gradient_and_that_of_the_scale(row: str, subtests: pytest.Subtests) -> None:
    """Given scales are half of those of the ranges, so that many codes are clipped."""
    clipped = 0
    for spec, dtype, (n, k) in zip(SPECS, itertools.cycle(DTYPES), itertools.cycle([(3, 33), (20, 257)]), strict=False):
        with subtests.test(spec=spec.name, dtype=dtype, n=n, k=k):
            weight, grad = weight_of(n, k, dtype), torch.randn(n, k).to(dtype)
            _, scale, zero = quantize_weight(weight, spec.fake_quantize_args)
            given = (scale / 2, zero if spec.asymmetric else None)
            _, scale, zero = quantize_weight(weight, spec.fake_quantize_args, *given)
            previous = _C.force_kernel(row)
            try:
                args = weight, scale, zero, *spec.fake_quantize_args[:2]
                grad_weight, alone = grad.clone(), grad.clone()
                grad_scale = torch.ops.lowbit.fake_quantize_backward_(grad_weight, *args, True)
                assert _C.last_kernel("fake_quantize_backward") == row
                none = torch.ops.lowbit.fake_quantize_backward_(alone, *args, False)
            finally:
                _C.force_kernel(previous)
            wanted, of_scale, size = gradients_of(weight, grad, scale, zero, spec)
            assert torch.equal(grad_weight, wanted) and torch.equal(alone, wanted) and none.numel() == 0, spec
            terms = (spec.group_size or k) + 4
            testing.assert_within(grad_scale, of_scale, terms * testing.ROUNDOFF["float32"] * size, what=f"{row} {spec}")
            clipped += int((wanted != grad).sum())
    assert clipped > 1000


def test_autograd_gives_these_gradients_and_none_where_none_is_wanted() -> None:
    spec = LinearSpec("int4", 32, scale="absmax")
    weight, grad = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64)
    _, first, zero = quantize_weight(weight, spec.fake_quantize_args)
    scale = (first * 0.75).requires_grad_()
    fake_quantize_weight(weight, spec.fake_quantize_args, scale).backward(grad)
    stored = quantize_weight(weight, spec.fake_quantize_args, scale.detach())[1]
    wanted, of_scale, _ = gradients_of(weight.detach(), grad, stored, zero, spec)
    assert torch.equal(weight.grad, wanted)
    torch.testing.assert_close(scale.grad, of_scale.float(), rtol=1e-5, atol=1e-5)
    scale.grad = None
    fake_quantize_weight(weight.detach(), spec.fake_quantize_args, scale.detach().requires_grad_()).sum().backward()
    assert scale.grad is None and not fake_quantize_weight(weight.detach(), spec.fake_quantize_args).requires_grad


@pytest.mark.parametrize("group_size", [0, 32])
def test_what_is_not_finite_makes_its_group_nan(group_size: int, subtests: pytest.Subtests) -> None:
    spec = LinearSpec("int8", group_size, scale="absmax")
    weight = torch.randn(4, 64)
    given = quantize_weight(weight, spec.fake_quantize_args)[1]
    weight[1, 3], weight[2, 40] = torch.inf, torch.nan
    nan = torch.zeros(4, 64, dtype=torch.bool)
    nan[1, : group_size or 64], nan[2, 64 - (group_size or 64) :] = True, True
    for scale in (None, given):
        with subtests.test(given=scale is not None):
            assert torch.equal(fake_quantize_weight(weight, spec.fake_quantize_args, scale).isnan(), nan)


@pytest.mark.core
@pytest.mark.parametrize("row", rows_of("fake_quantize_activations"))
def test_every_row_rounds_activations_as_the_reference(row: str, subtests: pytest.Subtests) -> None:
    for (m, k), dtype, x_format, group_size in itertools.product(
        [(1, 1), (3, 33), (2, 160), (600, 257)], DTYPES, X_FORMATS, (0, 32, 128)
    ):
        with subtests.test(m=m, k=k, dtype=dtype, x_format=x_format, group_size=group_size):
            x = (torch.randn(m, k) * torch.logspace(-3, 2, m)[:, None] + 0.3).to(dtype)
            x[0] = 0
            previous = _C.force_kernel(row)
            try:
                out = fake_quantize_activations(x, _C.X_FORMATS[x_format], group_size)
            finally:
                _C.force_kernel(previous)
            assert _C.last_kernel("fake_quantize_activations") == row
            wanted = reference_activations.quantize_activations(x, x_format, group_size).decode()
            assert torch.equal(out, wanted.float().to(dtype)), (m, k, dtype, x_format, group_size)


@pytest.mark.parametrize("group_size", [0, 32])
@pytest.mark.parametrize("x_format", [name for name in X_FORMATS if name.startswith("int8")])
@pytest.mark.parametrize("row", [name for name in rows_of("linear") if name.startswith("linear_int8_int8_")])
def test_the_kernels_of_linear_multiply_these_activations(row: str, x_format: str, group_size: int, subtests: pytest.Subtests) -> None:
    """By the identity: each result is one activation, exact but for the offset of an asymmetric row, which is added."""
    k, codes = 96, (128 + torch.eye(96)).to(torch.uint8)
    spec = LinearSpec("int8", group_size, x_format=x_format, scale="absmax")
    layer = lowbit.QuantLinear.pack(codes, torch.ones(k, spec.groups(k)), None, spec)
    x = torch.randn(33, k) * torch.logspace(-2, 2, 33)[:, None] + 0.5
    wanted = fake_quantize_activations(x, _C.X_FORMATS[x_format], group_size)
    served = 0
    for m in (1, 5, 33):
        with subtests.test(m=m):
            if not testing.serves(row, testing.LinearCase(m, k, k, group_size=group_size, x_format=x_format)):
                continue
            previous = _C.force_kernel(row)
            try:
                y = layer(x[:m])
            finally:
                _C.force_kernel(previous)
            served += 1
            if x_format != "int8_row_asymmetric":
                assert torch.equal(y, wanted[:m])
            else:
                size = wanted[:m].abs() + 255 * (x[:m].amax(1, True) - x[:m].amin(1, True)) / 254
                testing.assert_within(y, wanted[:m].double(), 4 * testing.ROUNDOFF["float32"] * size.double(), what=row)
    assert served


WEIGHT = torch.ones(2, 64)
INT4 = LinearSpec("int4", 32, scale="absmax").fake_quantize_args
ASYMMETRIC = LinearSpec("int4", 32, True, mapping="asymmetric", scale="absmax").fake_quantize_args


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: fake_quantize_weight(WEIGHT.double(), INT4), TypeError, "weight must be float32, bfloat16 or float16"),
        (lambda: fake_quantize_weight(WEIGHT[0], INT4), ValueError, r"weight must have shape \[n, k\], got \[64\]"),
        (lambda: fake_quantize_weight(WEIGHT, (INT4[0], 48, 0)), ValueError, "group_size must be 32, 64, 128, 256 or 0"),
        (lambda: fake_quantize_weight(WEIGHT, (0, 0, 0)), ValueError, "format must have codes, got float32"),
        (lambda: fake_quantize_weight(WEIGHT, (INT4[0], 32, 7)), ValueError, "mapping must be 0..2, got mapping=7"),
        (lambda: fake_quantize_weight(WEIGHT, INT4, torch.ones(2, 1)), ValueError, r"scale must have shape \[2, 2\]"),
        (lambda: fake_quantize_weight(WEIGHT, ASYMMETRIC, torch.ones(2, 2)), ValueError, "zero must be given if scale is given"),
        (lambda: fake_quantize_weight(WEIGHT, INT4, None, torch.ones(2, 2)), ValueError, "zero must be given if scale is given"),
        (lambda: fake_quantize_activations(WEIGHT.int(), 1, 0), TypeError, "x must be float32, bfloat16 or float16"),
        (lambda: fake_quantize_activations(WEIGHT, 0, 0), ValueError, "x_format must be one that rounds, got float"),
        (lambda: fake_quantize_activations(WEIGHT, 1, 5), ValueError, "group_size must be a multiple of 16 or 0"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named_with_data_and_without(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 6).mT.to(dtype)  # of any strides
    ops, scale = torch.ops.lowbit, torch.rand(6, 2)
    torch.library.opcheck(ops.fake_quantize.default, (weight, *INT4))
    torch.library.opcheck(ops.fake_quantize.default, (weight, *ASYMMETRIC, scale, torch.full((6, 2), 7.0), True))
    for wanted in (True, False):
        args = (torch.randn(6, 64).to(dtype), weight, scale, torch.full((6, 2), 8.0), *INT4[:2], wanted)
        torch.library.opcheck(ops.fake_quantize_backward_.default, args)
    torch.library.opcheck(ops.fake_quantize_activations.default, (weight, 1, 32))
