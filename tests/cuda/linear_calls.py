# SPDX-License-Identifier: Apache-2.0
"""Calls of linear that together use every weight format, way of activations, number of scales a tile and of rows a CTA."""

from __future__ import annotations

import torch
from settings import forced
from torch import Tensor

from lowbit import _C, testing
from lowbit.testing import LinearCase, LinearData, cached_data

N, K = 37, 150  # neither fills its last panel or tile
CASES = [
    LinearCase(m, N, K, dtype, format, group_size, mapping, x_format, *post_ops)
    for m, dtype, format, group_size, mapping, x_format, *post_ops in (
        (1, "float32", "float32", 0, "symmetric", "float", None, "none", False, False),
        (21, "bfloat16", "float32", 0, "symmetric", "float", "float32", "relu", True, False),
        (9, "bfloat16", "bfloat16", 0, "symmetric", "float", "float32", "none", False, True),
        (20, "float16", "float16", 0, "symmetric", "float", "dtype of x", "silu", True, True),
        (1, "bfloat16", "int8", 0, "symmetric", "float", "dtype of x", "gelu", False, False),
        (17, "float32", "int8", 0, "symmetric", "int8_row", "float32", "none", False, False),
        (9, "float16", "int8", 0, "asymmetric", "int8_row_asymmetric", None, "none", False, False),
        (5, "bfloat16", "int8", 32, "asymmetric", "int8_group", "float32", "gelu_tanh", True, True),
        (8, "bfloat16", "int4", 128, "symmetric", "float", None, "none", False, False),
        (33, "float32", "int4", 256, "asymmetric", "float", "float32", "none", False, False),
        (40, "bfloat16", "int4", 32, "symmetric_no_clipping_err", "int8_group", "float32", "silu", True, False),
        (3, "float32", "int4", 0, "symmetric", "int8_row", None, "none", False, False),
        (1, "bfloat16", "nf4", 64, "symmetric", "float", None, "none", False, False),
        (10, "float32", "nf4", 32, "symmetric", "float", "float32", "none", False, True),
        (2, "float16", "fp4", 128, "symmetric", "float", None, "none", False, False),
        (12, "bfloat16", "fp4_e2m1", 16, "symmetric", "float", None, "none", False, False),
        (4, "bfloat16", "fp8_e4m3", 0, "symmetric", "float8_row", "float32", "none", False, False),
        (25, "float32", "fp8_e4m3", 64, "symmetric", "float", None, "none", False, False),
        (6, "float32", "int2", 0, "asymmetric", "int8_row", None, "none", False, False),
        (7, "bfloat16", "int3", 32, "symmetric", "float", None, "none", False, False),
        (16, "float16", "int5", 128, "asymmetric", "float", None, "none", False, False),
        (2, "bfloat16", "int6", 0, "symmetric", "int8_row", None, "none", False, False),
        (11, "bfloat16", "int7", 32, "asymmetric", "int8_row_asymmetric", None, "none", False, False),
    )
]
CASES += [  # a format that was added since: without scales, or one for all k
    LinearCase(m, N, K, dtype, format, 0, "symmetric", "float", None)
    for format in testing.dense_formats()
    if format not in {case.format for case in CASES}
    for m, dtype in ((1, "float32"), (20, "bfloat16"))
]


# Of int8 activations, in tiles of 128 columns and 64 rows.
CODE_TILES = [
    LinearCase(m, n, k, dtype, format, group_size, mapping, x_format, *post_ops)
    for m, n, k, dtype, format, group_size, mapping, x_format, *post_ops in (
        (129, 37, 150, "bfloat16", "int4", 32, "symmetric", "int8_group", "float32", "silu", True, False),
        (198, 150, 330, "bfloat16", "int4", 128, "symmetric", "int8_row", None, "none", False, True),
        (161, 140, 600, "float32", "int8", 256, "symmetric", "int8_group", "float32", "gelu", False, False),
        (136, 37, 150, "float16", "int4", 64, "asymmetric", "int8_row_asymmetric", "dtype of x", "none", False, False),
        (130, 20, 200, "bfloat16", "int3", 32, "asymmetric", "int8_row", None, "none", False, False),
        (194, 17, 150, "float32", "int8", 0, "symmetric", "int8_row", None, "none", False, False),
        (150, 33, 99, "float32", "int8", 0, "asymmetric", "int8_row", "float32", "none", False, False),
        (131, 16, 300, "float16", "int5", 0, "symmetric", "int8_row_asymmetric", None, "none", False, False),
    )
]


# By products of warpgroups; the last ones are int8 activations of weights with groups or zero points, in float16.
BY_WARPGROUPS = [
    LinearCase(m, n, k, dtype, format, group_size, mapping, x_format, *post_ops)
    for m, n, k, dtype, format, group_size, mapping, x_format, *post_ops in (
        (34, 37, 150, "bfloat16", "int4", 128, "symmetric", "float", "float32", "silu", True, True),
        (70, 300, 700, "bfloat16", "int4", 32, "symmetric", "float", None, "none", False, False),
        (33, 48, 330, "float16", "int4", 64, "asymmetric", "float", "dtype of x", "relu", True, False),
        (20, 33, 640, "bfloat16", "nf4", 64, "symmetric", "float", "float32", "none", False, False),  # in two splits
        (130, 20, 200, "bfloat16", "int8", 0, "symmetric", "float", None, "none", False, True),
        (270, 17, 130, "float16", "fp4_e2m1", 16, "symmetric", "float", None, "gelu", False, False),
        (40, 37, 99, "bfloat16", "fp8_e4m3", 64, "symmetric", "float", None, "none", False, False),
        (36, 20, 192, "bfloat16", "bfloat16", 0, "symmetric", "float", "float32", "none", False, False),
        (37, 37, 150, "bfloat16", "int7", 32, "asymmetric", "float", None, "none", False, False),
        (33, 33, 130, "float16", "int8", 0, "symmetric", "float", None, "none", False, False),
        (50, 40, 1500, "bfloat16", "int8", 0, "symmetric", "int8_row", "float32", "silu", True, True),
        (33, 33, 99, "float32", "int8", 0, "symmetric", "int8_row", None, "none", False, False),
        (129, 17, 200, "float16", "int3", 0, "symmetric", "int8_row_asymmetric", None, "none", False, False),
        (40, 37, 330, "bfloat16", "int4", 32, "symmetric", "int8_group", "float32", "silu", True, True),
        (70, 20, 600, "float16", "int4", 128, "asymmetric", "int8_row_asymmetric", None, "none", False, False),
        (18, 33, 520, "bfloat16", "int8", 256, "symmetric", "int8_group", None, "none", False, True),
        (20, 17, 99, "float16", "int3", 0, "asymmetric", "int8_row", None, "none", False, False),
    )
]


def row_of(case: LinearCase, suffix: str) -> str:
    return f"linear_{case.format}_{'int8_' if case.x_format.startswith('int8') else ''}{suffix}"


def run(case: LinearCase, device: str, row: str, data: LinearData | None = None) -> Tensor:
    """The case on a device by a row; the result on the CPU."""
    data = cached_data(case) if data is None else data
    there = [None if tensor is None else tensor.to(device) for tensor in (data.x, data.packed, data.bias, data.mul, data.add)]
    x, packed, bias, mul, add = there
    with forced(row):
        y = torch.ops.lowbit.linear(x, packed, *case.op_args, bias, _C.ACTIVATIONS[case.activation], mul, add)
    return y.cpu()


def allowed_by_warpgroups(case: LinearCase, data: LinearData) -> Tensor:
    exact = case.x_format.startswith("int8") and case.group_size == 0 and case.mapping == "symmetric"
    return data.allowed if exact else allowed_of_many_rows(case, data)


def allowed_of_many_rows(case: LinearCase, data: LinearData) -> Tensor:
    """A weight is rounded once more than the budget of the CPU's rows has it; codes of one scale a column are not."""
    exact = case.group_size == 0 and (case.format in ("int8", "bfloat16", "fp8_e4m3"))
    eps = torch.finfo(getattr(torch, case.dtype)).eps / 2
    weight = torch.ops.lowbit.dequantize(data.packed, *case.op_args[:5]).double()
    rounding = 0 if exact else 1.2 * eps * (data.x.double().abs() @ weight.abs().T) * (1 if data.mul is None else data.mul.double().abs())
    return data.allowed + rounding
