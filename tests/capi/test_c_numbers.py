# SPDX-License-Identifier: Apache-2.0
"""Every function of lowbit/lowbit.h gives, bit for bit, what Python's call of the same op gives."""

from __future__ import annotations

import ctypes
import itertools
import math

import pytest
import torch
from c_calls import INT32, INT64, c_weight, call, last_error, options, status
from torch import Tensor

import lowbit
from lowbit import _C, testing

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
THREADS = (1, 3)
ops = torch.ops.lowbit


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def packed_in_c(weight: Tensor, format: str, group_size: int, mapping: str, scale: str) -> tuple[Tensor, tuple[int, int, int, int, bool]]:
    """The bytes that lowbit_quantize writes, and the numbers that ops take behind them."""
    numbers = (*weight.shape, _C.FORMATS[format], group_size, mapping == "asymmetric")
    count = INT64()
    call("packed_bytes", c_weight(None, *numbers), ctypes.byref(count))
    packed = torch.zeros(_C.packed_shape(_C.LAYOUTS[_C.LAYOUT], *numbers), dtype=torch.uint8)
    assert count.value == packed.numel()
    chosen = options("quantize", mapping=_C.MAPPINGS[mapping], scale_choice=_C.SCALE_CHOICES[scale])
    call("quantize", weight, c_weight(packed, *numbers), chosen)
    return packed, numbers


def cases_of(format: str) -> list[tuple[int, str, str]]:
    """group_size, mapping and choice of scales."""
    kind = _C.FORMAT_FACTS[format]["kind"]
    if kind == "float":
        return [(0, "symmetric", "absmax")]
    cases = [(0, "symmetric", "absmax"), (64, "symmetric", "search")]
    if kind == "integer":
        cases += [(32, "asymmetric", "absmax"), (32, "symmetric_no_clipping_err", "absmax")]
    return cases[:1] if format == "int8_semi_sparse" else cases


@pytest.mark.parametrize("format", _C.FORMATS)
def test_quantize_dequantize_and_linear(format: str, subtests: pytest.Subtests) -> None:
    n, k, number = 69, 132, INT32(-1)  # enough products for threads
    call("find_format", format.encode(), ctypes.byref(number))
    assert number.value == _C.FORMATS[format]
    weight = torch.randn(n, k)
    if format == "int8_semi_sparse":
        weight.view(n, k // 4, 4)[:, :, 2:] = 0
    for group_size, mapping, scale in cases_of(format):
        with subtests.test(group_size=group_size, mapping=mapping, scale=scale):
            packed, numbers = packed_in_c(weight, format, group_size, mapping, scale)
            wanted = torch.zeros_like(packed)
            _C.quantize(weight, wanted, *numbers[2:], _C.MAPPINGS[mapping], _C.SCALE_CHOICES[scale])
            assert packed.equal(wanted)
            out = torch.empty(n, k)
            call("dequantize", c_weight(packed, *numbers), out)
            assert out.equal(ops.dequantize(packed, *numbers))
            check_linear(packed, numbers, format)


def check_linear(packed: Tensor, numbers: tuple[int, int, int, int, bool], format: str) -> None:
    n, k = numbers[:2]
    for dtype, x_format, threads in itertools.product(FLOATS, _C.FORMAT_FACTS[format]["x_formats"], THREADS):
        torch.set_num_threads(threads)
        for m, activation in ((1, "none"), (33, "silu")):
            x, bias = torch.randn(1, m, k, dtype=dtype), torch.randn(n)
            mul, add, y = (torch.randn(1, m, n, dtype=dtype) for _ in range(3))
            post = {"bias": bias, "mul": mul, "add": add} if activation == "silu" else {}
            chosen = options("linear", x_format=_C.X_FORMATS[x_format], activation=_C.ACTIVATIONS[activation], **post)
            call("linear", x, c_weight(packed, *numbers), y, chosen)
            assert y.equal(ops.linear(x, packed, *numbers, _C.X_FORMATS[x_format], activation=_C.ACTIVATIONS[activation], **post))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gated", [True, False])
def test_experts(dtype: torch.dtype, gated: bool) -> None:
    count, hidden, width, tokens, each = 5, 96, 64, 7, 2
    numbers = [(width * (1 + gated), hidden, _C.FORMATS["int4"], 32, False), (hidden, width, _C.FORMATS["int4"], 32, False)]
    packed = [torch.stack([packed_in_c(torch.randn(*of[:2]), "int4", 32, "symmetric", "search")[0] for _ in range(count)]) for of in numbers]
    weights = [c_weight(data, *of) for data, of in zip(packed, numbers, strict=True)]
    x, y, scores = torch.randn(tokens, hidden, dtype=dtype), torch.empty(tokens, hidden, dtype=dtype), torch.rand(tokens, each)
    biases = {"gate_up_bias": torch.randn(count, width * (1 + gated)), "down_bias": torch.randn(count, hidden, dtype=dtype)}
    gate = {"interleaved": True, "alpha": 1.7, "limit": 1.5, "up_offset": 1.0} if gated else {}
    for of, x_format, threads in itertools.product((torch.int32, torch.int64), ("float", "int8_group"), THREADS):
        torch.set_num_threads(threads)
        index, formats = torch.randint(0, count + 1, (tokens, each), dtype=of), _C.X_FORMATS[x_format]  # `count` stands for no expert
        activation = 4 if gated else 5  # silu, relu squared
        chosen = options("experts", gate_up_x_format=formats, down_x_format=formats, activation=activation, no_gate=not gated, **gate, **biases)
        call("experts", x, *weights, index, scores, y, chosen)
        arguments = [[*of, formats] for of in numbers]
        assert y.equal(ops.experts(x, *packed, index, scores, *arguments, activation, gated, **gate, **biases))
    call("experts", x[:0], *weights, index[:0], scores[:0], y[:0], None if gated else options("experts", no_gate=1))


def test_linear_without_options_and_without_rows() -> None:
    packed, numbers = packed_in_c(torch.randn(16, 64), "int4", 32, "symmetric", "search")
    x, y = torch.randn(2, 64), torch.empty(2, 16)
    call("linear", x, c_weight(packed, *numbers), y, None)
    assert y.equal(ops.linear(x, packed, *numbers, 0))
    call("linear", x[:0], c_weight(packed, *numbers), y[:0], None)


def test_a_weight_quantized_in_python_is_used_as_it_is() -> None:
    layer = torch.nn.Linear(96, 48)
    with torch.no_grad():
        model = torch.nn.Sequential(layer)
        lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
        quantized, x, y = model[0], torch.randn(5, 96), torch.empty(5, 48)
        _, format, n, k, group_size, asymmetric, x_format, layout = quantized.layout.tolist()  # as a state dict has it
        weight = c_weight(quantized.weight, n, k, format, group_size, bool(asymmetric), layout)
        call("linear", x, weight, y, options("linear", x_format=x_format, bias=quantized.bias))
        assert y.equal(quantized(x))


@pytest.mark.parametrize("layout", _C.LAYOUTS)
def test_repack_and_embedding(layout: str) -> None:
    packed, numbers = packed_in_c(torch.randn(37, 100), "int6", 32, "asymmetric", "absmax")
    number = _C.LAYOUTS[layout]
    other = torch.zeros(_C.packed_shape(number, *numbers), dtype=torch.uint8)
    call("repack", c_weight(packed, *numbers), c_weight(other, *numbers, number))
    again = torch.zeros_like(packed)
    call("repack", c_weight(other, *numbers, number), c_weight(again, *numbers))
    assert again.equal(packed)
    for dtype, of in itertools.product(FLOATS, (torch.int32, torch.int64)):
        which = torch.tensor([[36, 0, 5], [5, 16, 2]], dtype=of)
        out = torch.empty(2, 3, 100, dtype=dtype)
        call("embedding", c_weight(other, *numbers, number), which, out)
        assert out.equal(ops.embedding(other, which, torch.empty(0, dtype=dtype), *numbers, number))


def test_importance_of_a_search() -> None:
    weight, importance = torch.randn(20, 64), torch.rand(64)
    numbers = (20, 64, _C.FORMATS["int3"], 32, False)
    packed, wanted = (torch.zeros(_C.packed_shape(0, *numbers), dtype=torch.uint8) for _ in range(2))
    call("quantize", weight, c_weight(packed, *numbers), options("quantize", scale_choice=1, importance=importance))
    _C.quantize(weight, wanted, *numbers[2:], 0, 1, importance)
    assert packed.equal(wanted) and not packed.equal(packed_in_c(weight, "int3", 32, "symmetric", "search")[0])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2)])
def test_attention_forward(dtype: torch.dtype, heads: int, kv_heads: int, subtests: pytest.Subtests) -> None:
    b, length, s, e, ev, real = 2, 19, 45, 48, 32, torch.float64 if dtype is torch.float64 else torch.float32
    q = torch.randn(b, length, heads, e, dtype=dtype).transpose(1, 2)  # strides of projections
    k, v = (torch.randn(b, kv_heads, s + 3, columns, dtype=dtype)[:, :, :s] for columns in (e, ev))
    masks = {"none": None, "bool": torch.rand(b, 1, length, s) < 0.7, "float": torch.randn(1, heads, length, s)}
    for (kind, mask), causal, scale, threads in itertools.product(masks.items(), (False, True), (0.0, 0.3), THREADS):
        with subtests.test(mask=kind, causal=causal, scale=scale, threads=threads):
            torch.set_num_threads(threads)
            out, lse, sink = torch.empty(b, length, heads, ev, dtype=dtype).transpose(1, 2), torch.empty(b, heads, length, dtype=real), torch.randn(heads, dtype=real)
            given = {"sink": sink, "lse": lse} | ({} if mask is None else {"mask": mask})
            call("attention_forward", q, k, v, out, options("attention_forward", scale=scale, causal=causal, **given))
            wanted, statistic, _ = ops.attention_forward(q, k, v, scale or 1 / math.sqrt(e), causal, mask, 0.0, None, [], [], [], [], [], [0, 0], sink)
            assert out.equal(wanted) and lse.equal(statistic)


def test_attention_of_contiguous_tensors_without_options() -> None:
    q, k, v, out = (torch.randn(1, 2, 7, 32) for _ in range(4))
    call("attention_forward", q, k, v, out, None)
    testing.assert_within(out, torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double()), torch.tensor(1e-5), "attention")


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_quantized_cache_is_that_of_python(format: str, dtype: torch.dtype) -> None:
    """Keys and values are appended in two parts, then a prompt and single tokens attend."""
    b, heads, kv_heads, e, room = 2, 6, 2, 80, 64
    int4, layer = format == "int4", lowbit.QuantizedKVCache(format).layer(0)
    codes_type, row_bytes, groups = torch.uint8 if int4 else torch.int8, INT64(), INT64()
    call("kv_sizes", 4 if int4 else 5, e, ctypes.byref(row_bytes), ctypes.byref(groups))
    codes = [torch.zeros(b, kv_heads, room, row_bytes.value, dtype=codes_type) for _ in range(2)]
    scales = [torch.zeros(b, kv_heads, room, groups.value, dtype=torch.float16 if int4 else torch.float32) for _ in range(2)]
    end = 0
    for length in (21, 1, 1):
        q, key, value = (torch.randn(b, count, length, e, dtype=dtype) for count in (heads, kv_heads, kv_heads))
        layer.append(key, value)
        begin, end = end, end + length
        for x, code, scale, rotate in zip((key, value), codes, scales, (int4, False), strict=True):
            call("kv_quantize", x, code[:, :, begin:end], scale[:, :, begin:end], rotate)
        for window, threads in itertools.product((0, 9), THREADS):
            torch.set_num_threads(threads)
            out, sink = torch.empty(b, heads, length, e, dtype=dtype), torch.randn(heads)
            parts = {"k_scale": scales[0][:, :, :end], "v_scale": scales[1][:, :, :end], "sink": sink}
            chosen = options("decode", rotated=int4, causal=1, window=window, **parts)
            call("decode", q, *(code[:, :, :end] for code in codes), out, chosen)
            assert out.equal(layer.attend(q, window=window, sink=sink))
    for code, scale, wanted, rotated in zip(codes, scales, (layer.keys(dtype), layer.values(dtype)), (int4, False), strict=True):
        decoded = torch.empty(b, kv_heads, end, e, dtype=dtype)
        call("kv_dequantize", code[:, :, :end], scale[:, :, :end], decoded, rotated)
        assert decoded.equal(wanted)


def test_decode_over_floats_with_a_mask() -> None:
    q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 300, 64), torch.randn(1, 2, 300, 64)
    mask, out = torch.rand(1, 1, 1, 300) < 0.5, torch.empty(1, 4, 1, 64)
    call("decode", q, k, v, out, options("decode", mask=mask, scale=0.2))
    assert out.equal(ops.decode(q, k, v, 0.2, None, None, False, False, 0, 0, 64, mask))


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_and_rope_append(dtype: torch.dtype) -> None:
    x, weight, add, y = torch.randn(3, 5, 96, dtype=dtype), torch.randn(96), torch.randn(3, 5, 96, dtype=dtype), torch.empty(3, 5, 96, dtype=dtype)
    call("rms_norm", x, weight, 1e-5, y, options("rms_norm", offset=1.0, add=add))
    assert y.equal(ops.rms_norm(x, weight, 1e-5, 1.0, add))
    call("rms_norm", x, weight, 1e-6, y, None)
    assert y.equal(ops.rms_norm(x, weight, 1e-6, 0.0))
    b, length, heads, kv_heads, e, room = 2, 3, 4, 2, 32, 11
    qkv, norm = torch.randn(b, length, heads + 2 * kv_heads, e, dtype=dtype), torch.randn(e)
    cos, sin = torch.randn(1, length, 16), torch.randn(1, length, 16)
    for weights in ({}, {"q_weight": norm, "k_weight": norm}):
        keys, values, wanted_keys, wanted_values = (torch.zeros(b, kv_heads, room, e, dtype=dtype) for _ in range(4))
        rotated, eps = torch.empty(b, heads, length, e, dtype=dtype), 1e-6 if weights else 0.0
        call("rope_append", qkv, cos, sin, 5, keys, values, rotated, options("rope_append", eps=eps, **weights))
        wanted = ops.rope_append_(qkv, cos, sin, wanted_keys, wanted_values, 5, *weights.values(), **({"eps": eps} if weights else {}))
        assert rotated.equal(wanted) and keys.equal(wanted_keys) and values.equal(wanted_values) and keys[:, :, 5:8].any()


def test_threads_are_torchs_where_torch_is() -> None:
    torch.set_num_threads(2)
    assert status("num_threads") == 2
    assert status("set_num_threads", 3) == 5 and "torch.set_num_threads" in last_error()
    assert status("num_threads") == 2
