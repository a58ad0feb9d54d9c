# SPDX-License-Identifier: Apache-2.0
"""torch's own checks of our registrations: schema, fake kernel, autograd registration, tracing with dynamic shapes."""

from __future__ import annotations

import pytest
import torch

from lowbit import _C, testing
from lowbit.testing import LinearCase, cached_data

CASES = [
    LinearCase(3, 20, 70, "float32", "int8", 0, "symmetric", "float", "float32", "none"),
    LinearCase(3, 20, 70, "bfloat16", "int4", 32, "symmetric", "int8_group", "dtype of x", "gelu", True, True),
    LinearCase(1, 17, 128, "float16", "int8", 0, "symmetric", "int8_row", None, "silu", False, True),
    LinearCase(4, 16, 64, "float32", "int4", 128, "asymmetric", "int8_row_asymmetric", "float32", "relu"),
    LinearCase(5, 20, 64, "float32", "bfloat16", 0, "symmetric", "float", None, "gelu_tanh", True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_linear(case: LinearCase, requires_grad: bool) -> None:
    data = cached_data(case)
    arguments = (data.x.clone().requires_grad_(requires_grad), data.packed, *case.op_args, data.bias,
                 _C.ACTIVATIONS[case.activation], data.mul, data.add)  # fmt: skip
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not requires_grad:  # gradients are the business of the Function outside the op
        utilities.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.lowbit.linear.default, arguments, test_utils=utilities)


@pytest.mark.parametrize("format, group_size, mapping", [("int8", 0, "symmetric"), ("int4", 32, "asymmetric"), ("float16", 0, "symmetric")])
def test_opcheck_dequantize(format: str, group_size: int, mapping: str) -> None:
    packed = testing.pack_weight(torch.randn(20, 70), format, group_size, mapping)
    arguments = (packed, 20, 70, _C.FORMATS[format], group_size, mapping == "asymmetric")
    torch.library.opcheck(torch.ops.lowbit.dequantize.default, arguments)


def test_ops_registered_once_and_registering_again_does_nothing() -> None:
    from lowbit.ops.registration import register, registered

    before = registered()
    register()
    assert registered() == before
    assert sorted(row["op"] for row in before) == ["lowbit::dequantize", "lowbit::linear"]
    assert all(row["how"] for row in before)
