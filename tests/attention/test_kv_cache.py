# SPDX-License-Identifier: Apache-2.0
"""QuantizedKVCache: what is appended, cropped and reordered is what attention sees, whatever the steps it came in."""

from __future__ import annotations

import pytest
import torch
from settings import ambient
from torch import Tensor

import lowbit
from lowbit import _C
from lowbit.reference import decode as reference

FORMATS = ["int8", "int4"]
CLOSE = 1e-3  # int16 queries: 2^-16 * largest |q| * sum |k| / sqrt(E) is 3e-4 for 64 normal numbers, and a probability is off by twice that


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def filled(format: str, length: int = 300, batch: int = 2, heads: int = 2, e: int = 64, ev: int = 64) -> lowbit.QuantizedKVCache:
    cache = lowbit.QuantizedKVCache(format)
    cache.append(0, normal(batch, heads, length, e), normal(batch, heads, length, ev))
    return cache


def wanted(cache: lowbit.QuantizedKVCache, q: Tensor, **options: object) -> Tensor:
    layer = cache.layers[0]
    return reference.decode(q, layer.keys(), layer.values(), q.shape[-1] ** -0.5, **options)[0]


@pytest.mark.parametrize("format", FORMATS)
def test_steps_of_any_length_give_the_same_cache(format: str) -> None:
    k, v = normal(2, 3, 700, 80), normal(2, 3, 700, 48)
    whole, steps = lowbit.QuantizedKVCache(format), lowbit.QuantizedKVCache(format)
    whole.append(0, k, v)
    for begin, end in ((0, 1), (1, 3), (3, 260), (260, 261), (261, 700)):
        steps.append(0, k[:, :, begin:end], v[:, :, begin:end])
    assert whole.length == steps.length == 700
    assert torch.equal(whole.layers[0].keys(), steps.layers[0].keys())
    assert torch.equal(whole.layers[0].values(), steps.layers[0].values())
    relative = (whole.layers[0].keys() - k).norm() / k.norm()
    assert relative < (0.01 if format == "int8" else 0.1)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("length", [1, 7, 16, 17, 100])
def test_few_and_many_queries_attend_alike(format: str, length: int, subtests: pytest.Subtests) -> None:
    cache, q = filled(format), normal(2, 8, length, 64)
    for options in ({"causal": True}, {"causal": False}, {"causal": True, "window": 50}):
        with subtests.test(options=options):
            position = {"position": 300 - length}
            error = (cache.attend(0, q, **options) - wanted(cache, q, **options, **position)).abs().max()
            assert error < CLOSE, (length, options)
    mask = torch.rand(2, 1, length, 300) > 0.3
    assert (cache.attend(0, q, causal=False, mask=mask) - wanted(cache, q, mask=mask.expand(2, 8, length, 300))).abs().max() < CLOSE
    bias = normal(8, 1, 300)
    result = cache.attend(0, q, mask=bias)
    assert (result - wanted(cache, q, mask=bias.expand(2, 8, length, 300), causal=True, position=300 - length)).abs().max() < CLOSE
    sink = normal(8)
    assert (cache.attend(0, q, causal=False, sink=sink) - wanted(cache, q, sink=sink)).abs().max() < CLOSE


def test_few_queries_never_make_the_cache_float() -> None:
    cache = filled("int8")
    cache.attend(0, normal(2, 8, 16, 64))
    assert _C.last_kernel("decode").startswith("decode_int8_")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models(format: str, dtype: torch.dtype) -> None:
    cache = lowbit.QuantizedKVCache(format)
    k, v, q = (normal(1, 2, 50, 64).to(dtype) for _ in range(3))
    cache.append(0, k, v)
    result = cache.attend(0, q[:, :, :1])
    assert result.dtype == dtype
    exact = wanted(cache, q[:, :, :1])
    assert (result - exact).abs().max() < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("format", FORMATS)
def test_crop_and_append_again(format: str) -> None:
    k, v = normal(1, 2, 90, 64), normal(1, 2, 90, 64)
    cache, fresh = lowbit.QuantizedKVCache(format), lowbit.QuantizedKVCache(format)
    cache.append(0, k, v)
    cache.append(0, normal(1, 2, 10, 64), normal(1, 2, 10, 64))
    cache.crop(80)
    cache.crop(-5)
    assert cache.length == 75
    cache.append(0, k[:, :, 75:], v[:, :, 75:])
    fresh.append(0, k, v)
    q = normal(1, 4, 1, 64)
    assert torch.equal(cache.attend(0, q), fresh.attend(0, q))
    for length in (91, -91):
        with pytest.raises(ValueError, match="crop must keep 0 to 90 tokens"):
            cache.crop(length)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("part", ["k", "v"])
def test_autograd_notices_an_append(format: str, part: str) -> None:
    cache = filled(format)
    cache.append(0, normal(2, 2, 1, 64), normal(2, 2, 1, 64))  # the storage grows: the next one is written in place
    scale = getattr(cache.layers[0], f"_{part}").part(0, 301)[1]
    factor = torch.ones((), requires_grad=True)
    saved = (factor * scale).sum()
    cache.append(0, normal(2, 2, 1, 64), normal(2, 2, 1, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize("format", FORMATS)
def test_reorder_follows_the_beams(format: str) -> None:
    cache, q = filled(format, batch=3), normal(3, 4, 1, 64)
    before = cache.attend(0, q)
    index = torch.tensor([2, 0, 0, 1])
    cache.reorder(index)
    assert torch.equal(cache.attend(0, q[index]), before[index])
    cache.append(0, normal(4, 2, 1, 64), normal(4, 2, 1, 64))
    assert cache.length == 301


def test_bytes_are_a_quarter_and_less_than_a_sixth_of_float32() -> None:
    float_bytes = 2 * 2 * 2 * 1024 * 128 * 4
    assert filled("int8", 1024, e=128, ev=128).nbytes / float_bytes == pytest.approx(0.25 + 1 / 128)
    assert filled("int4", 1024, e=128, ev=128).nbytes / float_bytes == pytest.approx(1 / 8 + 1 / 64)


@pytest.mark.parametrize(
    "key,value,error,text",
    [
        ((2, 2, 1, 64), (2, 2, 1), ValueError, r"value must have shape \[B, H, L, E\]"),
        ((2, 2, 1, 64), (2, 2, 2, 64), ValueError, "value must have batch, heads and length of key"),
        ((1, 2, 1, 64), (1, 2, 1, 64), ValueError, r"must be \[2, 2, L, 64\] and \[2, 2, L, 64\] as those in the cache"),
        ((2, 2, 1, 32), (2, 2, 1, 64), ValueError, r"must be \[2, 2, L, 64\]"),
    ],
)
def test_what_does_not_fit_leaves_the_cache_as_it_was(key: tuple[int, ...], value: tuple[int, ...], error: type[Exception], text: str) -> None:
    cache = filled("int8")
    with pytest.raises(error, match=text):
        cache.append(0, normal(*key), normal(*value))
    assert cache.length == 300


def test_bad_arguments_are_named(subtests: pytest.Subtests) -> None:
    with pytest.raises(ValueError, match="format must be int8 or int4, got 'fp8'"):
        lowbit.QuantizedKVCache("fp8")
    with pytest.raises(ValueError, match="append first"):
        lowbit.QuantizedKVCache().attend(0, normal(1, 1, 1, 64))
    cache = filled("int8")
    with pytest.raises(TypeError, match="key must be float32, bfloat16 or float16"):
        cache.append(0, normal(2, 2, 1, 64).double(), normal(2, 2, 1, 64))
    for shape in ((2, 3, 1, 64), (1, 8, 1, 64), (2, 8, 1, 32), (8, 1, 64)):
        with subtests.test(shape=shape), pytest.raises(ValueError, match=r"query must be \[2, a multiple of 2, L, 64\]"):
            cache.attend(0, normal(*shape))
    with pytest.raises(TypeError, match="query must be float32"):
        cache.attend(0, normal(2, 8, 1, 64).double())
    for shape in ((299,), (2, 3, 1, 300), (1, 2, 8, 1, 300)):
        with subtests.test(shape=shape), pytest.raises(ValueError, match="decode: mask must have "):
            cache.attend(0, normal(2, 8, 1, 64), mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_an_append_that_fails_leaves_an_empty_cache_empty(format: str) -> None:
    cache = lowbit.QuantizedKVCache(format)
    for key, value in (((1, 2, 3, 1000), (1, 2, 3, 64)), ((1, 2, 3, 64), (1, 2, 3, 1000))):
        with pytest.raises(ValueError, match="head dimensions of codes must be 1..512"):
            cache.append(0, normal(*key), normal(*value))
        assert cache.layers[0].shape is None and cache.length == 0 and cache.nbytes == 0
    cache.append(0, normal(1, 2, 3, 64), normal(1, 2, 3, 64))
    assert cache.length == 3


def test_a_crop_or_reorder_that_one_layer_refuses_changes_none() -> None:
    cache = lowbit.QuantizedKVCache("int8")
    for layer, length in ((0, 9), (1, 4)):
        cache.append(layer, normal(2, 2, length, 64), normal(2, 2, length, 64))
    for length in (-5, 7, -100):
        with pytest.raises(ValueError, match="crop must keep"):
            cache.crop(length)
        assert [layer.length for layer in cache.layers] == [9, 4]
    cache.append(2, normal(1, 2, 4, 64), normal(1, 2, 4, 64))
    keys = cache.layers[0].keys()
    with pytest.raises(IndexError, match="reorder must name entries 0 to 0"):
        cache.reorder(torch.tensor([1, 1]))
    assert torch.equal(cache.layers[0].keys(), keys)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_other_defaults_of_torch_change_nothing(format: str) -> None:
    k, v, few, many = normal(1, 2, 300, 64), normal(1, 2, 300, 64), normal(1, 4, 1, 64), normal(1, 4, 100, 64)

    def results() -> list[Tensor]:
        cache = lowbit.QuantizedKVCache(format)
        cache.append(0, k, v)
        cache.append(0, k, v)
        return [cache.attend(0, few), cache.attend(0, many, window=50), cache.layers[0].keys()]

    wanted = results()
    with ambient("default dtype float64"), ambient("default device meta"):
        again = results()
    assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True))


@pytest.mark.parametrize("window", [1, 4, 33])
@pytest.mark.parametrize("length", [1, 40, 200])
def test_a_window_of_the_cache_has_that_many_keys(window: int, length: int) -> None:
    """The query's own is one of them, as transformers' sliding_window counts."""
    cache = filled("int8", 200)
    out = cache.attend(0, normal(2, 4, length, 64), window=window, scale=0.0)  # averages what it sees
    values = cache.layers[0].values().repeat_interleave(2, 1)
    for i in range(length):
        end = 200 - length + i + 1
        torch.testing.assert_close(out[:, :, i], values[:, :, max(0, end - window) : end].mean(2), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("format", ("int8", "int4"))
def test_copy_on_write_clones_keep_their_original(format: str) -> None:
    codes, scale = torch.zeros(1, 1, 2, 32 if format == "int8" else 16, dtype=torch.int8 if format == "int8" else torch.uint8), torch.zeros(1, 1, 2, 1)
    others = torch._lazy_clone(codes), torch._lazy_clone(scale)
    torch.ops.lowbit.kv_quantize_(normal(1, 1, 2, 32), *others, False)
    assert not codes.any() and not scale.any() and others[0].any() and others[1].any()
    x = torch.zeros(1, 1, 2, 32)
    other = torch._lazy_clone(x)
    torch.ops.lowbit.kv_dequantize_(*others, other, False)
    assert not x.any() and other.any()
