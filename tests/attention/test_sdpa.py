# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention against torch's math path in float64, on every row, as torch's own tests do: our error may be
that of torch's math path in the same dtype times a factor, plus one rounding of the largest value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from settings import ambient, same_for_any_threads
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

import lowbit
from lowbit import _C, testing

sdpa = lowbit.scaled_dot_product_attention
FACTOR = {torch.float64: 1.0, torch.float32: 3.0, torch.bfloat16: 1.1, torch.float16: 1.1}
# B, Hq, Hkv, L, S, E, Ev: tiles are 128 x 128 forward and 64 x 128 backward, vectors 16, rows of a register tile 6 or 12.
SHAPES = (
    (1, 1, 1, 1, 1, 1, 1), (2, 4, 2, 5, 7, 3, 5), (1, 2, 2, 128, 128, 64, 64), (1, 2, 1, 130, 257, 40, 72),
    (1, 1, 1, 65, 127, 128, 96), (2, 3, 3, 17, 300, 59, 16), (1, 6, 2, 129, 31, 17, 33), (1, 2, 1, 70, 33, 16, 200),
    (1, 4, 2, 45, 300, 80, 96),
)  # fmt: skip


def make(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    b, hq, hkv, length, kv_length, e, ev = shape
    sizes = ((b, hq, length, e), (b, hkv, kv_length, e), (b, hkv, kv_length, ev))
    q, k, v = (torch.randn(size, dtype=torch.float64).to(dtype) for size in sizes)
    return q, k, v


def run(function: Callable[..., Tensor], tensors: Sequence[Tensor | None], grad_out: Tensor | None, dtype: torch.dtype, **options: object) -> list[Tensor]:
    """Result, and gradients of every floating input if ``grad_out`` is given."""
    inputs = [x if x is None or x.dtype == torch.bool else x.to(dtype).detach() for x in tensors]
    if grad_out is None:
        return [function(*inputs, **options)]
    floating = [x.requires_grad_() for x in inputs if x is not None and x.dtype != torch.bool]
    out = function(*inputs, **options)
    grads = torch.autograd.grad(out, floating, grad_out.to(dtype), allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(floating, grads, strict=True))]


def torch_math(*inputs: Tensor, **options: object) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(*inputs, **options)


def assert_as_good_as_torch(tensors: Sequence[Tensor | None], *, grad_out: Tensor | None = None, factor: float | None = None, **options: object) -> list[Tensor]:
    """Ours against the math path in float64, with the error of the math path in the dtype of the query as the measure."""
    dtype = tensors[0].dtype
    ours = run(sdpa, tensors, grad_out, dtype, **options)
    wanted = run(torch_math, tensors, grad_out, torch.float64, **options)
    theirs = run(torch_math, tensors, grad_out, dtype, **options)
    for name, a, w, t in zip(("out", "query", "key", "value", "attn_mask"), ours, wanted, theirs, strict=False):
        assert a.dtype == dtype and a.shape == w.shape
        if a.numel() == 0:
            continue
        scale = w.abs().max().item()
        allowed = (factor or FACTOR[dtype]) * (t.double() - w).abs().max().item() + testing.ROUNDOFF.get(str(dtype)[6:], 2.0**-50) * scale
        allowed += 8 * (2.0**-24 if dtype != torch.float64 else 2.0**-50) * scale
        error = (a.double() - w).abs().max().item()
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}, options {options}"
    return ours


def shapes_of(row: str) -> list[tuple[int, ...]]:
    queries, keys = testing.fewest_scores(row)
    return [shape for shape in SHAPES if shape[3] >= queries and shape[4] >= keys]


def test_forward_of_every_row_is_as_good_as_torch(any_forward_row: str, subtests: pytest.Subtests) -> None:
    for dtype, shape, causal in itertools.product(testing.attention_dtypes(any_forward_row), shapes_of(any_forward_row), (False, True)):
        with subtests.test(dtype=dtype, shape=shape, causal=causal):
            assert_as_good_as_torch(make(shape, dtype), is_causal=causal, enable_gqa=True)
            assert _C.last_kernel("attention_forward") == any_forward_row


def test_backward_of_every_row_is_as_good_as_torch(any_backward_row: str, subtests: pytest.Subtests) -> None:
    for dtype, shape, causal in itertools.product(testing.attention_dtypes(any_backward_row), shapes_of(any_backward_row), (False, True)):
        with subtests.test(dtype=dtype, shape=shape, causal=causal):
            q, k, v = make(shape, dtype)
            grad_out = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64).to(dtype)
            assert_as_good_as_torch((q, k, v), grad_out=grad_out, is_causal=causal, enable_gqa=True)
            assert _C.last_kernel("attention_backward") == any_backward_row


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("spread", [1.0, 4.0, 6.0])
def test_16_bit_gradients_of_large_scores_are_as_good_as_torch(backward_row: str, dtype: torch.dtype, spread: float, subtests: pytest.Subtests) -> None:
    """At scores of some hundreds (spread 6: 700) one key has all the probability, and dp - D, which should be 0 there, is whatever D = sum(grad_out * out) lost when
    the result was rounded: the backward must have the result in float32."""
    for shape, causal in itertools.product(((4, 4, 4, 3, 6, 8, 8), (1, 4, 2, 130, 257, 40, 72)), (False, True)):
        with subtests.test(shape=shape, causal=causal):
            q, k, v = make(shape, torch.float64)
            inputs = [(q * spread).to(dtype), (k * spread).to(dtype), v.to(dtype)]
            grad_out = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64).to(dtype)
            assert_as_good_as_torch(inputs, grad_out=grad_out, is_causal=causal, enable_gqa=True, scale=1.0)


def mask_shapes(b: int, h: int, length: int, kv_length: int) -> list[tuple[int, ...]]:
    full = (b, h, length, kv_length)
    broadcast = [tuple(size if keep else 1 for size, keep in zip(full, keeps)) for keeps in itertools.product((True, False), repeat=4)]
    return [*broadcast, (length, kv_length), (kv_length,), (1, kv_length), (h, 1, kv_length), ()]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_masks_of_every_broadcast_shape_and_their_gradients(dtype: torch.dtype, subtests: pytest.Subtests) -> None:
    b, h, length, kv_length = 2, 2, 66, 130
    q, k, v = make((b, h, h, length, kv_length, 16, 16), dtype)
    grad_out = torch.randn(b, h, length, 16).to(dtype)
    for shape in mask_shapes(b, h, length, kv_length):
        with subtests.test(shape=shape):
            keep = torch.rand(shape) > 0.3
            assert_as_good_as_torch((q, k, v, keep), grad_out=grad_out)
            bias = torch.randn(shape, dtype=torch.float64).to(dtype)
            if shape and shape[-1] > 1:  # a mask that is equal along k has no effect: its gradient is rounding alone
                assert_as_good_as_torch((q, k, v, bias), grad_out=grad_out)
            assert_as_good_as_torch((q, k, v, bias.masked_fill(~keep, -math.inf)))


def test_a_float32_mask_goes_with_16_bit_queries() -> None:
    q, k, v = make((1, 2, 2, 40, 50, 16, 16), torch.bfloat16)
    mask = torch.randn(40, 50, requires_grad=True)
    out = sdpa(q, k, v, mask)
    wanted = torch_math(q.double(), k.double(), v.double(), mask.double())
    assert (out.double() - wanted).abs().max() < 2.0**-7
    (grad,) = torch.autograd.grad(out.float().sum(), mask)
    assert grad.dtype == torch.float32


def test_masks_with_any_strides(subtests: pytest.Subtests) -> None:
    q, k, v = make((2, 2, 2, 33, 70, 8, 8), torch.float32)
    base = torch.randn(70, 33, 2, 2)
    for mask in (base.permute(2, 3, 1, 0), base.permute(3, 2, 1, 0), torch.randn(2, 2, 33, 140)[..., ::2], torch.randn(70, 33).T):
        with subtests.test(strides=mask.stride()):
            assert_as_good_as_torch((q, k, v, mask))
            assert_as_good_as_torch((q, k, v, mask > 0))


def test_tensors_with_any_strides() -> None:
    shape = (2, 4, 4, 70, 90, 24, 24)
    q, k, v = make(shape, torch.float32)
    wanted = sdpa(q, k, v)
    token_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    wide = [torch.cat([x, x + 1], -1)[..., :24] for x in (q, k, v)]
    columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    for tensors in (token_major, wide, columns):
        assert torch.equal(sdpa(*tensors), wanted)
    one = k[:, :1]
    assert torch.equal(sdpa(q, one.expand_as(k), v), sdpa(q, one.repeat(1, 4, 1, 1), v))
    grad_out = torch.randn_like(wanted)
    expanded = torch.randn(2, 4, 70, 1).expand(2, 4, 70, 24)
    for grad in (grad_out, grad_out.transpose(1, 2).contiguous().transpose(1, 2), expanded):
        dense = run(sdpa, (q, k, v), grad.contiguous(), torch.float32)
        for a, b in zip(run(lambda *x: sdpa(*x), token_major, grad, torch.float32), dense, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_any_number_of_leading_dimensions(leading: tuple[int, ...]) -> None:
    q, k, v = torch.randn(*leading, 20, 8), torch.randn(*leading, 30, 8), torch.randn(*leading, 30, 12)
    grad_out = torch.randn(*leading, 20, 12)
    assert_as_good_as_torch((q, k, v), grad_out=grad_out, is_causal=True)
    mask = torch.randn(*leading, 20, 30)
    assert_as_good_as_torch((q, k, v, mask), grad_out=grad_out)
    if leading:
        assert_as_good_as_torch((q, k, v, mask[..., :1, :, :][(0,) * (len(leading) - 1)]), grad_out=grad_out)


@pytest.mark.parametrize("leading", ((1, 4), (2, 1), (1, 1)), ids=str)
def test_batches_and_heads_broadcast(leading: tuple[int, int]) -> None:
    q = torch.randn(2, 4, 20, 8)
    k, v = torch.randn(*leading, 30, 8), torch.randn(*leading, 30, 8)
    assert_as_good_as_torch((q, k, v), grad_out=torch.randn(2, 4, 20, 8))


@pytest.mark.parametrize("length, kv_length", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 200), (200, 1)])
def test_lengths_of_0_and_1(length: int, kv_length: int, subtests: pytest.Subtests) -> None:
    for dtype, causal in itertools.product((torch.float32, torch.float64), (False, True)):
        with subtests.test(dtype=dtype, causal=causal):
            q, k, v = make((2, 2, 2, length, kv_length, 8, 8), dtype)
            ours = run(sdpa, (q, k, v), torch.randn(2, 2, length, 8), dtype, is_causal=causal)
            wanted = run(torch_math, (q, k, v), torch.randn(2, 2, length, 8), torch.float64, is_causal=causal)
            assert [x.shape for x in ours] == [x.shape for x in wanted]
            assert all(torch.isfinite(x).all() for x in ours)
            torch.testing.assert_close(ours[0].double(), wanted[0], atol=1e-5, rtol=1e-5)


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient(subtests: pytest.Subtests) -> None:
    q, k, v = make((1, 2, 2, 70, 140, 16, 16), torch.float32)
    keep = torch.rand(70, 140) > 0.5
    keep[3] = keep[69] = False
    for mask in (keep, torch.zeros(70, 140).masked_fill(~keep, -math.inf)):
        with subtests.test(dtype=mask.dtype):
            out, grad_q, grad_k, grad_v, *_ = run(sdpa, (q, k, v, mask), torch.randn(1, 2, 70, 16), torch.float32)
            assert torch.equal(out[:, :, [3, 69]], torch.zeros(1, 2, 2, 16))
            assert torch.equal(grad_q[:, :, [3, 69]], torch.zeros(1, 2, 2, 16))
            assert torch.isfinite(out).all() and torch.isfinite(grad_k).all() and torch.isfinite(grad_v).all()
    out = sdpa(q, k, v, torch.zeros(70, 140, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("scale", [0.0, -1.5, 1e-3, 30.0])
def test_any_scale(scale: float) -> None:
    q, k, v = make((1, 2, 2, 50, 140, 16, 16), torch.float32)
    assert_as_good_as_torch((q, k, v), scale=scale)
    # p = exp(s - lse) with lse rounded to float32: at scale 30 it is 400, and p is off by 2^-16. torch's flash kernels do the same, its tests allow 10.
    assert_as_good_as_torch((q, k, v), grad_out=torch.randn(1, 2, 50, 16), scale=scale, factor=10.0)


def test_scores_beyond_float16_do_not_overflow() -> None:
    q = torch.full((1, 1, 4, 64), 200.0, dtype=torch.float16)
    v = torch.randn(1, 1, 4, 64).half()
    mean = v.float().mean(2, keepdim=True).expand(1, 1, 4, 64)
    assert ((sdpa(q, q, v, scale=1.0).float() - mean).abs() <= 2.0**-11 * mean.abs() + 2.0**-24).all()


def test_nan_and_inf_reach_the_rows_that_see_them_only() -> None:
    q, k, v = make((1, 1, 1, 40, 40, 16, 16), torch.float32)
    clean = sdpa(q, k, v, is_causal=True)
    q[0, 0, 7, 3] = math.nan
    out = sdpa(q, k, v, is_causal=True)
    assert out[0, 0, 7].isnan().all() and torch.equal(out[0, 0, 8:], clean[0, 0, 8:]) and torch.equal(out[0, 0, :7], clean[0, 0, :7])


@pytest.mark.parametrize("shape", [(1, 1, 1, 300, 300, 16, 16), (1, 2, 2, 100, 150, 16, 24), (2, 4, 2, 70, 300, 33, 16)], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3}], ids=str)
def test_the_bits_do_not_depend_on_the_number_of_threads(shape: tuple[int, ...], options: dict[str, object]) -> None:
    tensors = make(shape, torch.float32)
    mask = None if options else torch.randn(1, shape[1], 1, shape[4])

    def call() -> list[Tensor]:
        torch.manual_seed(5)  # of dropout too
        grad_out = torch.randn(*shape[:2], shape[3], shape[6])
        return run(sdpa, (*tensors, mask), grad_out, torch.float32, enable_gqa=True, **options)

    same_for_any_threads(call)


@pytest.mark.parametrize("shape", [(1, 1, 1, 200, 2100, 16, 24), (1, 2, 1, 300, 1300, 17, 16), (1, 6, 3, 70, 1100, 16, 16)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_heads_cut_into_chunks_of_keys_have_the_gradients_of_whole_heads(backward_row: str, shape: tuple[int, ...], causal: bool) -> None:
    """Beyond 1024 keys one thread takes whole heads, two share a head by chunks of keys, and many make two passes: each to the bit the same."""
    q, k, v = make(shape, torch.float32)
    grad_out = torch.randn(*shape[:2], shape[3], shape[6])
    same_for_any_threads(lambda: run(sdpa, (q, k, v), grad_out, torch.float32, enable_gqa=True, is_causal=causal), (1, 2, 3, 5, 16))
    assert_as_good_as_torch((q, k, v), grad_out=grad_out, enable_gqa=True, is_causal=causal)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    q, k, v = make((3, 2, 2, 200, 260, 32, 32), torch.float32)
    whole = sdpa(q, k, v)
    assert torch.equal(sdpa(q[1:2], k[1:2], v[1:2]), whole[1:2])
    assert torch.equal(sdpa(q[:, :, 100:171], k, v), whole[:, :, 100:171])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": (2, 1, 5, 7)}, {"mask": (4, 1, 7)}, {"scale": 0.7}], ids=str)
def test_gradcheck(options: dict[str, object]) -> None:
    q, k, v = (x.requires_grad_() for x in make((2, 4, 2, 5, 7, 3, 4), torch.float64))
    shape = options.pop("mask", None) if (options := dict(options)) else None
    mask = None if shape is None else torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, k, v, mask: sdpa(q, k, v, mask, enable_gqa=True, **options), (q, k, v, mask))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": (2, 1, 5, 7)}], ids=str)
def test_gradgradcheck(options: dict[str, object]) -> None:
    q, k, v = (x.requires_grad_() for x in make((2, 2, 1, 5, 7, 3, 2), torch.float64))
    shape = options.pop("mask", None) if (options := dict(options)) else None
    mask = None if shape is None else torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda q, k, v, mask: sdpa(q, k, v, mask, enable_gqa=True, **options), (q, k, v, mask))


def test_one_tensor_may_be_query_key_and_value() -> None:
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sdpa(x, x, x, is_causal=True), x)
    assert torch.autograd.gradgradcheck(lambda x: sdpa(x, x, x, is_causal=True), x)


def test_few_queries_with_large_scores_have_the_gradients_of_many() -> None:
    """The forward must sum scores in the order of the backward: where |s| is some hundreds, p = exp(s - lse) is off by 2e-5, by 1e-4 if decode sums them."""
    worst = 0.0
    for seed in range(20):
        torch.manual_seed(seed)
        inputs = [(torch.randn(4, 4, length, 8) * 5).requires_grad_() for length in (3, 6, 6)]
        found, wanted = (
            torch.autograd.grad(lowbit.scaled_dot_product_attention(*(tensor.to(dtype) for tensor in inputs), scale=4.0).sum(), inputs[2])[0]
            for dtype in (torch.float32, torch.float64)
        )
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    assert worst < 2e-5


@pytest.mark.parametrize("lengths", [(9, 9), (9, 13), (1, 13)])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("compiled", [False, True])
def test_torchs_causal_bias_is_its_matrix(make: Callable[..., CausalBias], lengths: tuple[int, int], compiled: bool) -> None:
    q, k, v = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (lengths[0], lengths[1], lengths[1]))
    bias = make(*lengths)
    attend = torch.compile(sdpa, fullgraph=True, backend="aot_eager") if compiled else sdpa
    found, wanted = attend(q, k, v, bias), sdpa(q, k, v, bias._materialize())
    torch.testing.assert_close(found, wanted)
    for a, b in zip(torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(wanted.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_a_mask_and_causality_hold_together(kind: torch.dtype) -> None:
    q, k, v = torch.randn(2, 4, 20, 16), torch.randn(2, 4, 30, 16), torch.randn(2, 4, 30, 16)
    mask = torch.randn(2, 1, 20, 30)
    mask = mask > -1 if kind == torch.bool else mask
    hidden = torch.ones(20, 30, dtype=torch.bool).triu(1)  # in the mask: torch 2.15 refuses one beside is_causal
    both = mask.masked_fill(hidden, False if kind == torch.bool else -math.inf)
    torch.testing.assert_close(sdpa(q, k, v, mask, is_causal=True), functional.scaled_dot_product_attention(q, k, v, both))


@pytest.mark.parametrize("kv_heads", [(2, 1), (1, 4), (8, 2), (4, 8)], ids=str)
def test_keys_and_values_may_differ_in_heads_as_in_torch(kv_heads: tuple[int, int]) -> None:
    inputs = [torch.randn(2, h, n, 16, requires_grad=True) for h, n in ((8, 20), (kv_heads[0], 30), (kv_heads[1], 30))]
    ours, theirs = sdpa(*inputs, enable_gqa=True), functional.scaled_dot_product_attention(*inputs, enable_gqa=True)
    torch.testing.assert_close(ours, theirs)
    for a, w in zip(torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs), strict=True):
        torch.testing.assert_close(a, w)


def test_other_defaults_of_torch_change_nothing() -> None:
    q, k, v = torch.randn(2, 4, 20, 16), torch.randn(2, 2, 30, 16), torch.randn(2, 2, 30, 16)
    biases = (None, causal_lower_right(20, 30), torch.randn(20, 30))
    wanted = [sdpa(q, k, v, bias, enable_gqa=True) for bias in biases]
    with ambient("default dtype float64"), ambient("default device meta"):
        results = [sdpa(q, k, v, bias, enable_gqa=True) for bias in biases]
        dropped = sdpa(q, k, v, dropout_p=0.5, enable_gqa=True)
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True)) and dropped.device.type == "cpu" and dropped.isfinite().all()
