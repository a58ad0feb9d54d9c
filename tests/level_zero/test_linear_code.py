# SPDX-License-Identifier: Apache-2.0
"""The code of Intel's compiler for linear: no register in memory, packed bytes read once, the dpas that the products need."""

from __future__ import annotations

from pathlib import Path

import ocloc
import pytest
from modules import constants_of, linear_module, x_parts

from lowbit import _C
from lowbit.testing import LinearCase

pytestmark = pytest.mark.skipif(bool(ocloc.missing()), reason=ocloc.missing())
KERNELS = {"linear_1", "linear_8", "linear_many"}
KINDS = [
    LinearCase(1, 16, 64, dtype, format, group_size, mapping, x_format)
    for dtype, format, group_size, mapping, x_format in (
        ("bfloat16", "int4", 128, "symmetric", "float"),
        ("float32", "int7", 32, "asymmetric", "float"),
        ("float32", "nf4", 32, "symmetric", "float"),
        ("float16", "fp4_e2m1", 16, "symmetric", "float"),
        ("float32", "float32", 0, "symmetric", "float"),
        ("float16", "float16", 0, "symmetric", "float"),
        ("bfloat16", "fp8_e4m3", 0, "symmetric", "float"),
        ("float32", "int8", 0, "symmetric", "int8_row"),
        ("float32", "int4", 32, "asymmetric", "int8_group"),
        ("float32", "int3", 128, "symmetric", "int8_group"),
    )
]


@pytest.mark.parametrize("device", ocloc.lanes())
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_code_of_dpas(case: LinearCase, device: str, tmp_path: Path) -> None:
    lanes = ocloc.lanes()[device]
    kernels = ocloc.compile_module(linear_module(case, f"dpas{lanes}"), device, tmp_path)
    assert kernels.keys() == KERNELS
    needed = products(case) * (16 // lanes)  # of 8 rows and a tile
    for name, kernel in kernels.items():
        repeated = 1 if name == "linear_1" else 8
        assert not kernel.spilled_bytes and not kernel.private_bytes and not kernel.count(r"\bcall"), name
        assert not kernel.count(rf"dpas(?!\.8x{repeated} )")
        dpas = kernel.count(ocloc.PRODUCT)
        blocks = 2 if name == "linear_many" and lanes == 16 else 1
        assert dpas and needed * blocks % dpas == 0, f"{name}: {dpas} for {needed} a tile"
    # A tile, and what is on its way before the loop; a row of activations is 32 bytes.
    bits, tile = _C.FORMAT_FACTS[case.format]["bits"], 128 * _C.FORMAT_FACTS[case.format]["bits"]
    ahead = 512 if bits in (4, 8) and constants_of(case)[1] <= lanes // 8 else 0
    read = kernels["linear_1"].bytes_of_block_reads(64) - ahead
    assert read in (tile, tile // 2), f"{read} bytes of codes for {tile} a tile"  # a half in each of two rounds


def products(case: LinearCase) -> int:
    """dpas for 8 columns or 16, 8 rows and a tile: 32 k of codes each, 16 k of a part of either factor."""
    if not x_parts(case):
        return 2
    parts = constants_of(case)[1]
    return 4 * sum(i + j < 3 for i in range(x_parts(case)) for j in range(parts))


@pytest.mark.parametrize("name", ["linear_activations", "linear_floats_portable", "linear_codes_portable"])
@pytest.mark.parametrize("device", ["dg2", "tgllp"])
def test_code_without_dpas_has_no_register_in_memory(name: str, device: str, tmp_path: Path) -> None:
    kernels = ocloc.compile_module(_C.level_zero.module(name), device, tmp_path)
    assert kernels
    for of, kernel in kernels.items():
        assert not kernel.spilled_bytes and not kernel.count("dpas") and not kernel.count(r"\bcall"), of
