# SPDX-License-Identifier: Apache-2.0
"""Bad input: the right kind of error, naming op, argument, got and wanted; the same from the kernel and from the fake kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from torch._subclasses.fake_tensor import FakeTensorMode

from lowbit import _C, testing

N, K, GROUP = 20, 100, 32
INT4 = _C.FORMATS["int4"]


def arguments(**changes: Any) -> dict[str, Any]:
    packed = testing.pack_weight(torch.randn(N, K), "int4", GROUP)
    return {"x": torch.randn(3, K), "weight": packed, "n": N, "k": K, "format": INT4, "group_size": GROUP, "asymmetric": False,
            "x_format": 0, **changes}  # fmt: skip


BAD = {
    "x of integers": (dict(x=torch.ones(3, K, dtype=torch.int32)), TypeError, "linear: x must be float32, bfloat16 or float16, got"),
    "x of float64": (dict(x=torch.ones(3, K, dtype=torch.float64)), TypeError, "linear: x must be float32, bfloat16 or float16, got"),
    "wrong k": (dict(x=torch.ones(3, 64)), RuntimeError, r"linear: the last dimension of x must be k=100 \(in_features\), got x of shape \[3, 64\]"),
    "wrong k of as many tiles": (dict(x=torch.ones(3, K + 28)), RuntimeError, r"linear: the last dimension of x must be k=100 .*\[3, 128\]"),
    "weight of another k": (dict(k=300, x=torch.ones(3, 300)), ValueError, r"linear: weight must have the packed shape .* k=300"),
    "scalar x": (dict(x=torch.ones(())), RuntimeError, r"linear: the last dimension of x must be k=100 \(in_features\), got x of shape \[\]"),
    "weight of another n": (dict(n=40), ValueError, r"linear: weight must have the packed shape \[3, \d+\] of int4 with n=40"),
    "weight of another group size": (dict(group_size=64), ValueError, "linear: weight must have the packed shape"),
    "group size 48": (dict(group_size=48), ValueError, r"linear: group_size must be 32, 64, 128, 256 or 0 .*got group_size=48"),
    "weight not packed": (dict(weight=torch.randn(N, K)), TypeError, "linear: weight must be packed uint8, got float32"),
    "weight of rank 1": (dict(weight=torch.zeros(7, dtype=torch.uint8)), ValueError, r"linear: weight must have the packed shape .*got \[7\]"),
    "unknown format": (dict(format=17), ValueError, rf"linear: format must be 0\.\.{len(_C.FORMATS) - 1}, got format=17"),
    "n of zero": (dict(n=0), ValueError, "linear: n and k must be at least 1, got n=0"),
    "unknown x_format": (dict(x_format=9), ValueError, rf"linear: x_format must be 0\.\.{len(_C.X_FORMATS) - 1}, got x_format=9"),
    "unknown activation": (dict(activation=9), ValueError, r"linear: activation must be 0\.\.4, got activation=9"),
    "bias of another length": (dict(bias=torch.ones(N + 1)), ValueError, r"linear: bias must be a contiguous \[n=20\], got \[21\]"),
    "bias of integers": (dict(bias=torch.ones(N, dtype=torch.int64)), TypeError, "linear: bias must be float32, bfloat16 or float16, got int64"),
    "mul of another shape": (dict(mul=torch.ones(3, N + 1)), ValueError, r"linear: mul must have the shape of the result \[3, 20\], got \[3, 21\]"),
    "add of another rank": (dict(add=torch.ones(N)), ValueError, r"linear: add must have the shape of the result \[3, 20\], got \[20\]"),
    "add of another dtype": (dict(add=torch.ones(3, N).half()), TypeError, "linear: add must have the dtype of x, got float16 and float32"),
    "groups in a float weight": (dict(format=0), ValueError, "linear: group_size must be 0 and asymmetric false for a float32 weight, got group_size=32"),
}  # fmt: skip


@pytest.mark.parametrize("changes, kind, text", BAD.values(), ids=BAD)
def test_bad_input_names_op_argument_got_and_wanted_with_data_and_without(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    refused_alike(torch.ops.lowbit.linear, arguments(**changes), kind, text)


Q, KV, CODES, SCALES = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 32, dtype=torch.int8), torch.zeros(1, 2, 5, 1)
ATTENTION = {"q": Q, "k": KV, "v": KV, "scale": 1.0, "causal": False, "mask": None, "dropout_p": 0.0, "seed": None,
             "score_mod": [], "score_captured": [], "mask_mod": [], "mask_captured": [], "blocks": [], "block_size": [128, 128], "sink": None}  # fmt: skip
BACKWARD = ATTENTION | {"out": Q, "lse": Q[..., 0].contiguous(), "grad_out": Q, "grad_lse": None, "score_captured_needs": [],
                        "mask_needs": False, "sink_needs": False}  # fmt: skip
DECODE = {"q": Q, "k": KV, "v": KV, "scale": 1.0, "k_scale": None, "v_scale": None, "rotated": False, "causal": False, "position": 0,
          "window": 0, "v_columns": 8}  # fmt: skip
BAD_CALLS: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("attention_forward", ATTENTION, [
        {"q": Q[0]}, {"q": Q.int()}, {"k": KV.half()}, {"k": KV[..., :4]}, {"v": KV[:, :, :4]}, {"k": KV[:, :1], "v": KV}, {"q": Q[:, :3]},
        {"q": Q[..., :0], "k": KV[..., :0]}, {"v": KV[..., :0]}, {"mask": Q[:, :, :2]}, {"mask": Q.int()}, {"seed": torch.zeros(2)}, {"sink": torch.zeros(3)},
        {"sink": torch.zeros(4).double()}, {"scale": float("inf")}, {"dropout_p": 2.0}, {"blocks": [Q]}, {"blocks": [Q[..., 0], Q]},
        {"blocks": [Q[..., 0].int(), Q.int()], "block_size": [0, 1]}, {"block_size": [1]}, {"score_mod": [7]},
    ]),
    ("attention_backward", BACKWARD, [
        {"out": Q.half()}, {"grad_out": Q[:, :, :2]}, {"grad_lse": Q}, {"lse": Q}, {"mask_needs": True}, {"sink_needs": True},
        {"score_captured_needs": [True]}, {"mask": torch.zeros(1, 1, 1, 5, dtype=torch.bool), "mask_needs": True},
    ]),
    ("decode", DECODE, [
        {"q": Q[0]}, {"q": Q.double()}, {"k": KV.double()}, {"k": CODES, "v": CODES}, {"k": CODES, "v": CODES, "k_scale": SCALES, "v_scale": SCALES[:, :1]},
        {"rotated": True}, {"v_columns": 9}, {"v_columns": -1}, {"mask": Q}, {"sink": torch.zeros(3)}, {"window": -1}, {"scale": float("nan")},
        {"length": 6},
    ]),
    ("kv_quantize_", {"x": KV, "codes": CODES, "scale": SCALES, "rotate": False}, [
        {"x": KV[0]}, {"x": KV.double()}, {"codes": CODES.int()}, {"codes": CODES[..., :8]}, {"scale": SCALES.double()}, {"scale": CODES},
        {"x": torch.zeros(1, 2, 5, 600)}, {"first": 1},
    ]),
    ("kv_dequantize_", {"codes": CODES, "scale": SCALES, "x": KV, "rotated": False}, [{"x": KV[:, :, :3]}, {"x": KV.int()}]),
]  # fmt: skip


@pytest.mark.parametrize("name, base, change", [(name, base, change) for name, base, changes in BAD_CALLS for change in changes])
def test_fakes_of_attention_and_caches_refuse_with_the_same_text(name: str, base: dict[str, Any], change: dict[str, Any]) -> None:
    op = getattr(torch.ops.lowbit, name)
    op(**base)
    refused_alike(op, base | change)


def test_the_kernel_itself_wants_contiguous_tensors_and_the_public_function_makes_them() -> None:
    from lowbit.ops.linear import linear

    x = torch.randn(K, 3).T
    with pytest.raises(ValueError, match="linear: x must be contiguous"):
        torch.ops.lowbit.linear(**arguments(x=x))
    values = arguments(x=x)
    op_args = tuple(values[name] for name in ("n", "k", "format", "group_size", "asymmetric", "x_format"))
    bias, mul = torch.randn(2 * N)[::2], torch.randn(N, 3).T
    y = linear(x, values["weight"], op_args, bias, 1, mul, mul)
    plain = linear(x.contiguous(), values["weight"], op_args, bias.contiguous(), 1, mul.contiguous(), mul.contiguous())
    assert torch.equal(y, plain)


def test_quantized_activations_of_a_float_weight_are_refused() -> None:
    packed = testing.pack_weight(torch.randn(N, K), "float32")
    with pytest.raises(ValueError, match="linear: x_format must be float for a float32 weight, got int8_row"):
        torch.ops.lowbit.linear(torch.randn(3, K), packed, N, K, 0, 0, False, _C.X_FORMATS["int8_row"])


def test_int8_activations_go_with_integers_and_float8_ones_with_float8() -> None:
    x = torch.randn(3, K)
    for format, x_format, wanted in (
        ("nf4", "int8_row", "float"),
        ("fp8_e4m3", "int8_group", "float or float8_row"),
        ("int4", "float8_row", "float or int8_group or int8_row or int8_row_asymmetric"),
    ):
        weight = testing.pack_weight(torch.randn(N, K), format)
        call = arguments(x=x, weight=weight, format=_C.FORMATS[format], group_size=0, x_format=_C.X_FORMATS[x_format])
        refused_alike(torch.ops.lowbit.linear, call, ValueError, f"linear: x_format must be {wanted} for a {format} weight, got {x_format}")


def test_dequantize_refuses_a_weight_of_another_shape() -> None:
    packed = testing.pack_weight(torch.randn(N, K), "int4", GROUP)
    with pytest.raises(ValueError, match="dequantize: weight must have the packed shape"):
        torch.ops.lowbit.dequantize(packed, N + 32, K, INT4, GROUP, False)


def test_fake_tensors_without_data_are_refused_by_the_extension() -> None:
    with FakeTensorMode():
        weight = torch.randn(N, K)
    packed = testing.empty_packed(N, K, "int4", GROUP)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        _C.quantize(weight, packed, INT4, GROUP, False, 0)


def test_extension_takes_numpy_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    weight = torch.randn(N, K)
    packed = numpy.zeros(_C.packed_shape(0, N, K, INT4, GROUP, False), dtype=numpy.uint8)
    _C.quantize(weight.numpy(), packed, INT4, GROUP, False, 0)
    assert torch.equal(torch.from_numpy(packed), testing.pack_weight(weight, "int4", GROUP))


@pytest.mark.parametrize("changes, kind, text", [
    (dict(weight=torch.randn(N)), ValueError, "quantize: weight must have shape"),
    (dict(weight=torch.ones(N, K, dtype=torch.int64)), TypeError, "quantize: weight must be float32, bfloat16 or float16"),
    (dict(mapping=7), ValueError, "quantize: mapping must be"),
    (dict(mapping=2), ValueError, "quantize: mapping must be symmetric or symmetric_no_clipping_err with asymmetric=0, got asymmetric"),
    (dict(group_size=100), ValueError, "quantize: group_size must be 32, 64, 128, 256 or 0"),
    (dict(scale=2), ValueError, r"quantize: scale must be 0\.\.1, got scale=2"),
    (dict(scale=1, mapping=1), ValueError, "quantize: scale must be absmax with mapping symmetric_no_clipping_err"),
    (dict(importance=torch.ones(K)), ValueError, "quantize: importance must be None unless scale is search"),
    (dict(scale=1, importance=torch.ones(K + 1)), ValueError, r"quantize: importance must have shape \[\d+\], got \[\d+\]"),
    (dict(scale=1, importance=torch.ones(1, K)), ValueError, r"quantize: importance must have shape \[\d+\], got \[1, \d+\]"),
    (dict(scale=1, importance=torch.ones(K).double()), TypeError, "quantize: importance must be float32, got "),
    (dict(scale=1, importance=torch.ones(2 * K)[::2]), ValueError, "quantize: importance must be contiguous"),
    (dict(scale=1, importance=torch.full((K,), torch.inf)), ValueError, "quantize: importance must be finite, got inf or nan"),
    (dict(scale=1, weight=torch.full((N, K), torch.nan)), ValueError, "quantize: weight must be finite, got inf or nan"),
])  # fmt: skip
def test_quantize_refuses_bad_input(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    packed = testing.empty_packed(N, K, "int4", GROUP)
    values = {"weight": torch.randn(N, K), "packed": packed, "format": INT4, "group_size": GROUP, "asymmetric": False,
              "mapping": 0, **changes}  # fmt: skip
    with pytest.raises(kind, match=text):
        _C.quantize(**values)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_of_torch_are_refused_by_name(subtests: pytest.Subtests) -> None:
    x = torch.randn(1, 2, 3, 32)
    codes, scale, indices = torch.empty(1, 2, 3, 32, dtype=torch.int8), torch.empty(1, 2, 3, 1), torch.arange(3)
    packed = torch.zeros(2, 4096, dtype=torch.uint8)
    ops = torch.ops.lowbit

    def quantized(tensor: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)

    calls = {
        "kv_quantize: x": lambda: ops.kv_quantize_(quantized(x), codes, scale, False),
        "kv_quantize: codes": lambda: ops.kv_quantize_(x, quantized(codes), scale, False),
        "kv_quantize: scale": lambda: ops.kv_quantize_(x, codes, quantized(scale), False),
        "kv_dequantize: x": lambda: ops.kv_dequantize_(codes, scale, quantized(x), False),
        "decode: mask": lambda: ops.decode(x, x, x, 1.0, None, None, False, False, 0, 0, 32, quantized(torch.ones(1, 2, 3, 3)), None),
        "linear: x": lambda: ops.linear(quantized(x), packed, 32, 32, 0, 0, False, 0),
        "dequantize: weight": lambda: ops.dequantize(quantized(packed), 32, 32, 0, 0, False),
        "embedding: indices": lambda: ops.embedding(packed, quantized(indices), x, 32, 32, 0, 0, False, 0),
    }  # fmt: skip
    for name, call in calls.items():
        with subtests.test(name), pytest.raises(TypeError, match=f"^{name} must be"):
            call()
