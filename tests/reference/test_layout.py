# SPDX-License-Identifier: Apache-2.0
"""The packed bytes and the chosen scales: C++ against the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from settings import forced
from torch import Tensor

from lowbit import _C, force_kernel, testing
from lowbit.reference import layout
from lowbit.reference.quantize import quantize

SHAPES = ((1, 1), (16, 64), (17, 70), (33, 257), (5, 300))
QUANTIZED = [case[:3] for case in testing.format_cases() if _C.FORMAT_FACTS[case[0]]["kind"] != "float" and case[3] == "float"]


def rows_of(op: str) -> list[str]:
    """The rows of an op, but for that of blocks of GGUF (tests/checkpoints/test_gguf.py)."""
    return [str(row["name"]) for row in testing.rows(op) if row["available"] and "gguf" not in row["name"]]


def without_column_sum(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat([packed[:, :64], packed[:, 128:]], dim=1)


@pytest.mark.core
@pytest.mark.parametrize("row", rows_of("quantize"))
@pytest.mark.parametrize("format, group_size, mapping", QUANTIZED)
def test_quantize_packs_the_bytes_of_the_reference(row: str, format: str, group_size: int, mapping: str, subtests: pytest.Subtests) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n, k in SHAPES:
            with subtests.test(dtype=dtype, n=n, k=k):
                weight = torch.randn(n, k).to(dtype)
                with force_kernel(row):
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
    assert _C.last_kernel("quantize") == row


@pytest.mark.parametrize("format", testing.formats_of_kind("float"))
def test_float_weights_pack_to_the_bytes_of_the_reference(format: str, subtests: pytest.Subtests) -> None:
    for n, k in SHAPES:
        with subtests.test(n=n, k=k):
            weight = torch.randn(n, k).to(getattr(torch, format))
            packed = testing.pack_weight(weight.float(), format)
            assert torch.equal(packed, layout.pack_float(weight))
            assert torch.equal(layout.unpack_float(packed, n, k, format).float(), weight.float())


@pytest.mark.parametrize("format, group_size, mapping", QUANTIZED)
def test_codes_scales_and_zeros_become_panels_and_come_back(format: str, group_size: int, mapping: str, subtests: pytest.Subtests) -> None:
    asymmetric = mapping == "asymmetric"
    for n, k in SHAPES:
        with subtests.test(n=n, k=k):
            groups = -(-k // group_size) if group_size else 1
            codes = torch.randint(0, _C.FORMAT_FACTS[format]["code_max"] + 1, (n, k), dtype=torch.uint8)
            scale = torch.rand(n, groups) + 0.01
            zero = torch.randint(0, 16, (n, groups)).float() if asymmetric else None
            packed = testing.pack_codes(codes, scale, zero, format, group_size)
            got = layout.unpack(packed, n, k, format, group_size, asymmetric)
            assert torch.equal(got.codes, codes)
            torch.testing.assert_close(got.scale, scale, rtol=0 if group_size == 0 else 2.0**-11, atol=0)
            assert torch.equal(packed[:, :64], layout.pack(got)[:, :64])
            if zero is not None:
                assert torch.equal(got.zero.float(), zero)


@pytest.mark.core
@pytest.mark.parametrize("row", rows_of("repack"))
@pytest.mark.parametrize("format, group_size, mapping", [case[:3] for case in testing.format_cases() if case[3] == "float"])
def test_repacking_keeps_every_bit_and_gives_the_bytes_of_the_reference(row: str, format: str, group_size: int, mapping: str, subtests: pytest.Subtests) -> None:
    asymmetric, is_float = mapping == "asymmetric", _C.FORMAT_FACTS[format]["kind"] == "float"
    with forced(row):
        for n, k in SHAPES:
            with subtests.test(n=n, k=k):
                panels = testing.pack_weight(torch.randn(n, k) * 10.0 ** torch.randint(-9, 9, (n, 1)), format, group_size, mapping)
                weight = (n, k, format, group_size, asymmetric)
                rows = testing.repack(panels, "x86-panel-16x64", "row-major", *weight)
                if is_float:
                    assert torch.equal(rows, layout.row_major_float(layout.unpack_float(panels, n, k, format)))
                else:
                    plain = layout.unpack(panels, *weight)
                    assert torch.equal(rows, layout.row_major(plain))
                    again = layout.from_row_major(rows, k, format, group_size, asymmetric)
                    assert torch.equal(again.codes, plain.codes) and torch.equal(again.scale, plain.scale)
                for name in _C.LAYOUTS:  # any to any, and back to the bytes of quantize, sums and padding too
                    middle = testing.repack(rows, "row-major", name, *weight)
                    assert torch.equal(testing.repack(middle, name, "row-major", *weight), rows)
                    assert torch.equal(testing.repack(middle, name, "x86-panel-16x64", *weight), panels)


def mxfp4_blocks(codes: Tensor, scales: Tensor, halves: bool) -> tuple[Tensor, Tensor]:
    """Blocks ``[n, groups, 16]`` and their scales, apart from each other as in GGUF."""
    first, second = codes.chunk(2, -1) if halves else (codes[..., ::2], codes[..., 1::2])
    blocks = torch.cat([scales[..., None], first | second << 4], dim=-1)
    return blocks[..., 1:], blocks[..., 0]


@pytest.mark.core
@pytest.mark.parametrize("row", rows_of("repack"))
def test_blocks_of_mxfp4_become_the_bytes_of_their_codes(row: str, subtests: pytest.Subtests) -> None:
    for n, groups, halves in ((1, 1, False), (16, 2, True), (17, 3, False), (40, 5, True), (64, 64, False)):
        with subtests.test(n=n, groups=groups, halves=halves), forced(row):
            codes = torch.randint(0, 16, (n, groups, 32), dtype=torch.uint8)
            scales = torch.randint(100, 124, (n, groups), dtype=torch.uint8)
            packed = testing.empty_packed(n, 32 * groups, "fp4_e2m1", 32).fill_(255)
            _C.pack_mxfp4(*mxfp4_blocks(codes, scales, halves), halves, packed)
            scale = torch.exp2(scales.double() - 127).float()
            assert torch.equal(packed, testing.pack_codes(codes.flatten(1), scale, None, "fp4_e2m1", 32))


@pytest.mark.parametrize("scales, exact", [
    ([254, 215], True), ([254, 214], False), ([39, 0], True), ([40, 0], False), ([0, 0], True), ([127, 103], True), ([127, 102], True),
])  # fmt: skip
def test_scales_of_mxfp4_within_2_39_of_the_largest_are_exact(scales: list[int], exact: bool) -> None:
    codes, powers = torch.full((1, 2, 32), 2, dtype=torch.uint8), torch.tensor([scales], dtype=torch.uint8)
    packed = testing.empty_packed(1, 64, "fp4_e2m1", 32)
    _C.pack_mxfp4(*mxfp4_blocks(codes, powers, False), False, packed)
    got = torch.ops.lowbit.dequantize(packed, 1, 64, _C.FORMATS["fp4_e2m1"], 32, False)[0, ::32].double()
    wanted = torch.exp2(powers[0].double() - 127)
    assert got[0] == wanted[0] and got[1] == (wanted[1] if exact else 0)


@pytest.mark.parametrize("changes, error, text", [
    (dict(scales=torch.full((17, 2), 255, dtype=torch.uint8)), ValueError, r"every scale must be finite, got 255 \(nan\)"),
    (dict(scales=torch.zeros(17, 3, dtype=torch.uint8)), ValueError, r"scales must have shape \[17, 2\], as codes, got \[17, 3\]"),
    (dict(scales=torch.zeros(17, 2)), TypeError, r"scales must be uint8, got float32"),
    (dict(codes=torch.zeros(17, 2, 17, dtype=torch.uint8)), ValueError, r"codes must have shape \[n, k / 32, 16\].*, got \[17, 2, 17\]"),
    (dict(codes=torch.zeros(17, 2, 32, dtype=torch.uint8)[..., ::2]), ValueError, ".*16 neighbouring bytes"),
    (dict(out=torch.zeros(2, 100, dtype=torch.uint8)), ValueError, r"weight must have the packed shape \[2, \d+\].*, got \[2, 100\]"),
])  # fmt: skip
def test_pack_mxfp4_says_what_it_wanted(changes: dict[str, Tensor], error: type[Exception], text: str) -> None:
    given = dict(codes=torch.zeros(17, 2, 16, dtype=torch.uint8), scales=torch.zeros(17, 2, dtype=torch.uint8),
                 halves=False, out=testing.empty_packed(17, 64, "fp4_e2m1", 32))  # fmt: skip
    with pytest.raises(error, match=f"pack_mxfp4: {text}"):
        _C.pack_mxfp4(**given | changes)


def test_zero_points_between_and_beyond_the_codes_stay_what_they_are() -> None:
    zero = torch.tensor([[-3.5, 7.5, 300.0]]).repeat(17, 1)
    codes = torch.randint(0, 16, (17, 70), dtype=torch.uint8)
    packed = testing.pack_codes(codes, torch.ones(17, 3), zero, "int4", 32)
    assert torch.equal(layout.unpack(packed, 17, 70, "int4", 32, True).zero.float(), zero)
    rows = testing.repack(packed, "x86-panel-16x64", "row-major", 17, 70, "int4", 32, True)
    assert torch.equal(testing.repack(rows, "row-major", "x86-panel-16x64", 17, 70, "int4", 32, True), packed)


@pytest.mark.parametrize("changes, text", [
    (dict(layout=9), r"repack: layout must be 0\.\.1, got layout=9"),
    (dict(out_layout=-1), r"repack: layout must be 0\.\.1, got layout=-1"),
    (dict(layout=0), r"repack: packed must have shape \[2, \d+\], got \[17, \d+\]"),
    (dict(out_layout=1), r"repack: out must have shape \[17, \d+\], got \[2, \d+\]"),
    (dict(n=33), r"repack: packed must have shape \[33, \d+\], got \[17, \d+\]"),
])  # fmt: skip
def test_repack_says_what_it_wanted(changes: dict[str, int], text: str) -> None:
    given = dict(packed=testing.empty_packed(17, 70, "int4", 32, layout="row-major"), layout=1,
                 out=testing.empty_packed(17, 70, "int4", 32), out_layout=0, n=17, k=70, format=_C.FORMATS["int4"],
                 group_size=32, asymmetric=False)  # fmt: skip
    with pytest.raises(ValueError, match=text):
        _C.repack(**given | changes)


def test_rows_of_quantize_write_the_same_sums_of_columns(subtests: pytest.Subtests) -> None:
    rows = rows_of("quantize")
    if len(rows) == 1:
        pytest.skip(f"this machine has one row of quantize, {rows[0]}")
    for format, group_size, mapping in QUANTIZED:
        with subtests.test(format=format, group_size=group_size, mapping=mapping):
            weight, packed = torch.randn(21, 130), []
            for row in rows:
                with force_kernel(row):
                    packed.append(testing.pack_weight(weight, format, group_size, mapping))
            assert all(torch.equal(other, packed[0]) for other in packed), (format, group_size, mapping)


def test_quantize_reports_signal_and_noise() -> None:
    weight = torch.randn(40, 200)
    packed = testing.empty_packed(40, 200, "int4", 32)
    signal, noise, absmax_noise = _C.quantize(weight, packed, _C.FORMATS["int4"], 32, False, 0)
    decoded = layout.unpack(packed, 40, 200, "int4", 32, False).decode()
    assert signal == pytest.approx(float(weight.double().square().sum()), rel=1e-6)
    assert noise == pytest.approx(float((weight.double() - decoded).square().sum()), rel=1e-4)
    assert absmax_noise == noise
