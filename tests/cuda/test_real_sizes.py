# SPDX-License-Identifier: Apache-2.0
"""Every row for NVIDIA GPUs, by its name, at the sizes of real models; and, on any machine, that no row is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import attention_calls
import decode_calls
import optim_steps
import pytest
import torch
from attention_calls import FEW_QUERIES, AttentionCase, rows_of_few
from decode_calls import DecodeCase
from linear_calls import allowed_of_many_rows, run
from quantize_calls import QuantizeCall
from real_sizes import ATTENTION, COLUMNS, DECODE, DECODE_BY_CUDNN, DEVICE, SUFFIX, TIMES, K, decode_rows, linear_cases, repeated, rows
from settings import forced

from lowbit import _C, testing
from lowbit.testing import assert_within, cached_data


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    reason = "no NVIDIA GPU: tests/cuda/test_emulated.py runs the same kernels on the host"
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)(test))


def test_every_row_has_a_call_here() -> None:
    assert all(linear_cases(row) for row in rows("linear"))
    assert set(rows("attention_forward")) == {forward for forward, _ in ATTENTION}
    assert set(rows("attention_backward")) == {backward for _, backward in ATTENTION} and set(rows("decode")) == decode_rows()
    assert set(rows("optim_step")) == {f"optim_step_{format}_cuda" for format in testing.STATE_FORMATS}
    assert rows("quantize") == ["quantize_panels_cuda"]
    assert rows("dequantize") == ["dequantize_panels_cuda", "dequantize_rows_cuda"]


@pytest.mark.parametrize("row", ["linear_int4_cuda", "linear_int8_int8_cuda", "linear_bfloat16_cuda"])
def test_columns_that_repeat_are_the_call_with_all_of_them(row: str) -> None:
    for case in linear_cases(row, 300)[:2]:
        whole, data = repeated(case, cached_data(case), 3)
        assert_within(run(whole, "cpu", row.replace("_cuda", "_scalar"), data), data.wanted, data.allowed, str(whole))


@gpu
@pytest.mark.parametrize("row", rows("linear"), ids=str)
def test_linear(row: str) -> None:
    for case in linear_cases(row):
        few = cached_data(case)
        if row in ("linear_decoded_cublas", "linear_wgmma_cuda"):
            few = replace(few, allowed=allowed_of_many_rows(case, few))
        whole, data = repeated(case, few)
        first, second = (run(whole, DEVICE, row + SUFFIX, data) for _ in range(2))
        assert_within(first, data.wanted, data.allowed, f"{row} of {whole}")
        assert torch.equal(first, second)


@gpu
@pytest.mark.parametrize("format", testing.dense_formats())
def test_a_weight_is_packed_and_decoded_as_on_the_cpu(format: str) -> None:
    torch.manual_seed(0)
    n, group_size = COLUMNS * TIMES, 0 if _C.FORMAT_FACTS[format]["kind"] == "float" else 128
    call = QuantizeCall(format, group_size, "symmetric", "absmax", torch.randn(n, K).bfloat16(), None)
    packed = call.run(DEVICE, "quantize_panels_cuda" + SUFFIX)[0]
    assert torch.equal(packed, call.run("cpu", "quantize_panels_scalar")[0])
    numbers, some, like = (n, K, _C.FORMATS[format], group_size, False), torch.arange(0, n, 7), torch.zeros(1)
    wanted = torch.ops.lowbit.dequantize(packed, *numbers)
    with forced("dequantize_panels_cuda" + SUFFIX):
        assert torch.equal(torch.ops.lowbit.dequantize(packed.to(DEVICE), *numbers).cpu(), wanted)
    with forced("dequantize_rows_cuda" + SUFFIX):
        there = torch.ops.lowbit.embedding(packed.to(DEVICE), some.to(DEVICE), like.to(DEVICE), *numbers, _C.LAYOUTS[_C.LAYOUT])
    assert torch.equal(there.cpu(), wanted[some])


@gpu
@pytest.mark.parametrize(("rows", "case"), ATTENTION.items(), ids=str)
def test_attention(rows: tuple[str, str], case: AttentionCase) -> None:
    if "cudnn" in rows[0] and _C.cuda.cudnn_missing():
        pytest.skip(f"{_C.cuda.cudnn_missing()} (tools/cudnn_headers)")
    data = attention_calls.make_data(case)
    if "cudnn" in rows[1]:
        data = replace(data, grad_lse=None)  # which cuDNN does not take
    got = attention_calls.run(case, data, DEVICE, SUFFIX, rows)
    attention_calls.assert_right(case, got, attention_calls.expected(case, data))


@gpu
@pytest.mark.parametrize("case", FEW_QUERIES, ids=str)
def test_attention_of_few_queries(case: AttentionCase) -> None:
    test_attention(rows_of_few(case), case)


@gpu
@pytest.mark.parametrize("case", DECODE, ids=str)
def test_decode(case: DecodeCase) -> None:
    data = decode_calls.make_data(case)
    decode_calls.assert_right(case, data, *decode_calls.run(case, data, DEVICE, SUFFIX))


@gpu
@pytest.mark.parametrize("format", testing.STATE_FORMATS)
def test_a_step_has_the_bits_of_the_cpu(format: str) -> None:
    numels, block_size = (4 << 20, 33_000_001), 128 if format == "dynamic4" else 256
    here = optim_steps.step(f"optim_step_{format}_scalar", "adamw", format, block_size, "cpu", numels)
    there = optim_steps.step(f"optim_step_{format}_cuda{SUFFIX}", "adamw", format, block_size, DEVICE, numels)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@gpu
@pytest.mark.parametrize("case", DECODE_BY_CUDNN, ids=str)
def test_decode_by_cudnn(case: DecodeCase) -> None:
    if _C.cuda.cudnn_missing():
        pytest.skip(f"{_C.cuda.cudnn_missing()} (tools/cudnn_headers)")
    data = decode_calls.make_data(case)
    decode_calls.assert_right(case, data, *decode_calls.run(case, data, DEVICE, SUFFIX, "decode_cudnn"))
