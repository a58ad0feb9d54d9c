# SPDX-License-Identifier: Apache-2.0
"""The packed bytes and the chosen scales: C++ against the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch

from lowbit import _C, testing
from lowbit.reference import layout
from lowbit.reference.quantize import quantize

SHAPES = ((1, 1), (16, 64), (17, 70), (33, 257), (5, 300))
QUANTIZED = [case[:3] for case in testing.format_cases() if case[0] in ("int8", "int4") and case[3] == "float"]


def without_column_sum(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat([packed[:, :64], packed[:, 128:]], dim=1)


@pytest.mark.parametrize("format, group_size, mapping", QUANTIZED)
def test_quantize_packs_the_bytes_of_the_reference(format: str, group_size: int, mapping: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n, k in SHAPES:
            weight = torch.randn(n, k).to(dtype)
            packed = testing.pack_weight(weight, format, group_size, mapping)
            wanted = layout.pack(quantize(weight, format, group_size, mapping))
            assert packed.shape == wanted.shape
            got = layout.unpack(packed, n, k, format, group_size, mapping == "asymmetric")
            reference = layout.unpack(wanted, n, k, format, group_size, mapping == "asymmetric")
            assert torch.equal(got.column_scale, reference.column_scale)
            for mine, theirs in ((got.group_scale, reference.group_scale), (got.zero, reference.zero)):
                assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))
            assert torch.equal(got.codes, reference.codes)
            sums, wanted_sums = (bytes[:, 64:128].contiguous().view(torch.float32) for bytes in (packed, wanted))
            torch.testing.assert_close(sums, wanted_sums, rtol=1e-5, atol=1e-5 * k**0.5)
            assert torch.equal(without_column_sum(packed), without_column_sum(wanted))  # padding too


@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16"])
def test_float_weights_pack_to_the_bytes_of_the_reference(format: str) -> None:
    for n, k in SHAPES:
        weight = torch.randn(n, k).to(getattr(torch, format))
        packed = testing.pack_weight(weight, format)
        assert torch.equal(packed, layout.pack_float(weight))
        assert torch.equal(layout.unpack_float(packed, n, k, format), weight)


@pytest.mark.parametrize("format, group_size, mapping", QUANTIZED)
def test_pack_and_unpack_keep_codes_scales_and_zeros(format: str, group_size: int, mapping: str) -> None:
    asymmetric = mapping == "asymmetric"
    for n, k in SHAPES:
        groups = -(-k // group_size) if group_size else 1
        codes = torch.randint(0, 256 if format == "int8" else 16, (n, k), dtype=torch.uint8)
        scale = torch.rand(n, groups) + 0.01
        zero = torch.randint(0, 16, (n, groups)).float() if asymmetric else None
        spec = (n, k, _C.FORMATS[format], group_size, asymmetric)
        packed = torch.zeros(-(-n // 16), _C.panel_bytes(spec[2], k, group_size, asymmetric), dtype=torch.uint8)
        _C.pack(codes, scale, zero, packed, *spec)
        reference = layout.unpack(packed, n, k, format, group_size, asymmetric)
        assert torch.equal(reference.codes, codes)
        out_codes, out_scale, out_zero = torch.empty_like(codes), torch.empty_like(scale), torch.empty_like(scale)
        _C.unpack(packed, *spec, out_codes, out_scale, out_zero)
        assert torch.equal(out_codes, codes)
        assert torch.equal(out_scale, reference.scale)
        torch.testing.assert_close(out_scale, scale, rtol=0 if group_size == 0 else 2.0**-11, atol=0)
        assert torch.equal(out_zero, reference.zero_or_symmetric)
        if zero is not None:
            assert torch.equal(out_zero, zero)


def test_every_available_row_of_quantize_writes_the_same_bytes() -> None:
    rows = [str(row["name"]) for row in testing.rows("quantize") if row["available"]]
    for format, group_size, mapping in QUANTIZED:
        weight = torch.randn(21, 130)
        packed = []
        for row in rows:
            previous = _C.force_kernel(row)
            try:
                packed.append(testing.pack_weight(weight, format, group_size, mapping))
            except NotImplementedError:
                continue
            finally:
                _C.force_kernel(previous)
        assert len(packed) >= 1
        assert all(torch.equal(other, packed[0]) for other in packed), (format, group_size, mapping)


def test_quantize_reports_signal_and_noise() -> None:
    weight = torch.randn(40, 200)
    packed = torch.zeros(3, _C.panel_bytes(_C.FORMATS["int4"], 200, 32, False), dtype=torch.uint8)
    signal, noise = _C.quantize(weight, packed, _C.FORMATS["int4"], 32, False, 0)
    decoded = layout.unpack(packed, 40, 200, "int4", 32, False).decode()
    assert signal == pytest.approx(float(weight.double().square().sum()), rel=1e-6)
    assert noise == pytest.approx(float((weight.double() - decoded).square().sum()), rel=1e-4)
