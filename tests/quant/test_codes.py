# SPDX-License-Identifier: Apache-2.0
"""Codes, scales and zero points of a weight and the packed weight that holds them: the bytes of the reference."""

from __future__ import annotations

import pytest
import torch

from lowbit import _C, testing
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.codes import CodedWeight, split_scale
from lowbit.reference import layout, quantize

CASES = [
    LinearSpec(format, group_size, mapping == "asymmetric", mapping=mapping)
    for format, group_size, mapping, x_format in testing.format_cases()
    if _C.FORMAT_FACTS[format]["kind"] != "float" and x_format == "float"
]


@pytest.mark.parametrize("n, k", ((1, 1), (17, 70), (33, 257), (5, 300)))
@pytest.mark.parametrize("spec", CASES, ids=lambda spec: f"{spec.name} {spec.mapping}")
def test_a_weight_packs_to_the_bytes_of_the_reference_and_unpacks_again(spec: LinearSpec, n: int, k: int) -> None:
    codes = torch.randint(0, _C.FORMAT_FACTS[spec.format]["code_max"] + 1, (n, k), dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # nan of fp8_e4m3
    scale = torch.rand(n, spec.groups(k)) + 0.01
    zero = 20 * torch.rand(n, spec.groups(k)) - 5 if spec.asymmetric else None
    weight = CodedWeight.of(codes, scale, zero, spec)
    wanted = quantize.QuantizedWeight.of(codes, scale, zero, spec.format, spec.group_size)
    assert torch.equal(weight.pack("row-major"), layout.row_major(wanted))
    for name in _C.LAYOUTS:
        again = CodedWeight.unpack(weight.pack(name), StoredWeight(spec, n, k, name))
        assert torch.equal(again.codes, codes) and torch.equal(again.scale, wanted.scale)
        assert torch.equal(again.zero_point, wanted.zero_or_symmetric)


def test_scales_are_split_as_the_reference_splits_those_that_are_stored() -> None:
    largest = 2.0 ** torch.arange(-126.0, 127, 11)[:, None]
    parts = torch.rand(len(largest), 400) * 2.0 ** -torch.randint(0, 30, (len(largest), 400))
    rounded = torch.cat([torch.full_like(largest, 1.9999), parts[:, 1:]], dim=1).half().float()  # the first becomes 2
    subnormal = torch.cat([torch.full_like(largest, 2.0), torch.full_like(largest, 3 * 2.0**-24)], dim=1)
    for scale in (largest * parts, largest * rounded, largest * subnormal, torch.zeros(3, 2)):
        scale = scale.clamp(max=torch.finfo(torch.float32).max)
        for got, wanted in zip(split_scale(scale, 32), quantize.split_stored_scale(scale, 32), strict=True):
            assert torch.equal(got, wanted)


def test_a_float32_scale_of_a_group_keeps_11_bits_or_a_part_of_its_rows_largest() -> None:
    parts = torch.rand(50, 400) * 2.0 ** -torch.randint(0, 30, (50, 400))
    scale = parts * 2.0 ** torch.randint(-60, 60, (50, 1))
    column, group = split_scale(scale, 32)
    error = (column.double()[:, None] * group.double() - scale.double()).abs()
    bound = torch.maximum(2.0**-11 * scale.double(), 2.0**-25 * scale.double().amax(1, keepdim=True))
    assert (error <= bound).all() and (error > 0.4 * bound).any()


def test_a_weight_without_data_has_the_shape_that_its_layout_says() -> None:
    spec = LinearSpec("int4", 32)
    packed = CodedWeight.of(
        torch.empty(17, 70, dtype=torch.uint8, device="meta"), torch.empty(17, 3, device="meta"), None, spec
    ).pack()
    assert packed.is_meta and tuple(packed.shape) == spec.shape(17, 70)
    assert CodedWeight.unpack(packed, StoredWeight(spec, 17, 70, _C.LAYOUT)).codes.shape == (17, 70)
