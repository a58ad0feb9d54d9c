# SPDX-License-Identifier: Apache-2.0
"""A call of linear by the modules of csrc/level_zero on OpenCL: what csrc/level_zero/linear/rows.cpp launches."""

from __future__ import annotations

import struct
from pathlib import Path

import modules
import torch
from opencl import machine
from torch import Tensor

from lowbit import _C
from lowbit.testing import LinearCase, LinearData

DPAS = (Path(__file__).parent / "dpas.cl").read_text()
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FEWEST_OF_MANY = 64


def round_up(a: int, b: int) -> int:
    return -(-a // b) * b


def kernel_of(case: LinearCase, unit: str) -> tuple[str, int]:
    """The kernel of a call and the rows of a work-group."""
    if case.m == 1:
        return "linear_1", 1
    many = {"dpas8": 64, "dpas16": 128, "portable": 0}[unit]
    return ("linear_many", many) if many and case.m >= FEWEST_OF_MANY else ("linear_8", 8)


def linear(case: LinearCase, data: LinearData, unit: str) -> Tensor:
    """The result by the modules of a unit: dpas8, dpas16 or portable."""
    facts, parts, scales = _C.FORMAT_FACTS[case.format], modules.x_parts(case), modules.scales_per_tile(case)
    coded, groups = facts["kind"] != "float", -(-case.k // case.group_size) if case.group_size else 1
    padded, panels = round_up(case.k, 64), -(-case.n // 16)
    section, group_scale = round_up(groups * 32, 64), 128 if coded else 0
    zero = group_scale + (section if case.group_size else 0)
    codes = zero + (section if case.asymmetric else 0)
    sections = (16, panels, data.packed.shape[1], panels * 16, padded, 0, 64, group_scale, zero, codes)
    kernel, rows = kernel_of(case, unit)
    room = round_up(case.m, max(rows, 8))
    ordered = torch.full((room * padded * (4 if unit == "portable" else max(1, 2 * parts)),), 0xFF, dtype=torch.uint8)
    sums = torch.full((room * max(1, padded // 64 * scales), 4), -1, dtype=torch.int32)
    row_scale, row_offset = torch.full((2, case.m), torch.nan)
    y = torch.empty(case.m, case.n, dtype=data.x.dtype)

    def at(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    shift = (case.group_size * scales // 64).bit_length() - 1 if case.group_size else 0
    bias_dtype = DTYPES[torch.float32 if data.bias is None else data.bias.dtype]
    argument = struct.pack(
        "<i4xqqq?7x10qQQqiiibb2xii8Q", _C.FORMATS[case.format], case.n, case.k, case.group_size, case.asymmetric, *sections,
        at(data.packed), at(data.x), case.m, padded // 64, groups, shift, DTYPES[data.x.dtype], bias_dtype,
        _C.X_FORMATS[case.x_format], _C.ACTIVATIONS[case.activation], at(data.bias), at(data.mul), at(data.add), at(y), at(ordered),
        at(sums), at(row_scale), at(row_offset),
    )  # fmt: skip
    activations = machine().program((modules.SPIRV / "linear_activations.spv").read_bytes())
    if not parts:
        first = "code_groups" if scales else "code_rows"
    else:
        first = "widen_rows" if unit == "portable" else f"order_{parts}"
    machine().launch(activations, first, case.m, 256, argument)
    if parts and case.asymmetric:
        machine().launch(activations, "sum_rows", -(-case.m * padded // 64 * scales // 256), 256, argument)
    program = machine().program(modules.linear_module(case, unit), "" if unit == "portable" else DPAS)
    machine().launch(program, kernel, panels * -(-case.m // rows), 64 if unit == "dpas8" else 128, argument)
    return y
