# SPDX-License-Identifier: Apache-2.0
"""Fake kernels: shape, dtype and strides of each op's result, for tracing without data.

They refuse what csrc/ops refuses, with the same kind of error and the same text (tests/ops holds both to it). Results
are always contiguous: Inductor asserts exact strides.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit import _C
from lowbit.ops import attention_fakes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations, biases and the weights that quantize takes."""
_GROUP_SIZES = (0, 32, 64, 128, 256)
_FORMAT_NAMES = {value: name for name, value in _C.FORMATS.items()}
_X_FORMAT_NAMES = {value: name for name, value in _C.X_FORMATS.items()}


def linear(
    x: Tensor,
    weight: Tensor,
    n: int,
    k: int,
    format: int,
    group_size: int,
    asymmetric: bool,
    x_format: int,
    bias: Tensor | None = None,
    activation: int = 0,
    mul: Tensor | None = None,
    add: Tensor | None = None,
    row: int = 0,
) -> Tensor:
    check_spec("linear", n, k, format, group_size, asymmetric)
    if x.dtype not in FLOATS:
        raise TypeError(f"linear: x must be float32, bfloat16 or float16, got {name_of(x.dtype)}")
    if x.dim() < 1 or x.shape[-1] != k:
        raise RuntimeError(
            f"linear: the last dimension of x must be k={k} (in_features), got x of shape {shape_text(x.shape)}"
        )
    _check_weight("linear", weight, n, k, format, group_size, asymmetric)
    shape = (*x.shape[:-1], n)
    if bias is not None and bias.dtype not in FLOATS:
        raise TypeError(f"linear: bias must be float32, bfloat16 or float16, got {name_of(bias.dtype)}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != n):
        raise ValueError(f"linear: bias must be a contiguous [n={n}], got {shape_text(bias.shape)}")
    _check_like_y("mul", mul, x.dtype, shape)
    _check_like_y("add", add, x.dtype, shape)
    if not 0 <= activation < len(_C.ACTIVATIONS):
        raise ValueError(f"linear: activation must be 0..{len(_C.ACTIVATIONS) - 1}, got activation={activation}")
    if x_format not in _X_FORMAT_NAMES:
        raise ValueError(f"linear: x_format must be 0..{len(_C.X_FORMATS) - 1}, got x_format={x_format}")
    wanted = _C.FORMAT_FACTS[_FORMAT_NAMES[format]]["x_formats"]
    if _X_FORMAT_NAMES[x_format] not in wanted:
        raise ValueError(
            f"linear: x_format must be {' or '.join(wanted)} for a {_FORMAT_NAMES[format]} weight, "
            f"got {_X_FORMAT_NAMES[x_format]}"
        )
    return x.new_empty(shape)


def dequantize(weight: Tensor, n: int, k: int, format: int, group_size: int, asymmetric: bool) -> Tensor:
    check_spec("dequantize", n, k, format, group_size, asymmetric)
    _check_weight("dequantize", weight, n, k, format, group_size, asymmetric)
    return weight.new_empty((n, k), dtype=torch.float32)


def check_spec(op: str, n: int, k: int, format: int, group_size: int, asymmetric: bool) -> None:
    """Refuse what `weight_spec` of csrc/ops/linear.cpp refuses."""
    if format not in _FORMAT_NAMES:
        raise ValueError(f"{op}: format must be 0..{len(_FORMAT_NAMES) - 1}, got format={format}")
    if n < 1 or k < 1:
        raise ValueError(f"{op}: n and k must be at least 1, got n={n} k={k}")
    sixteen = _facts(format)["smallest_group"] == 16
    if group_size not in _GROUP_SIZES and not (sixteen and group_size == 16):
        sizes = f"{'16, ' if sixteen else ''}32, 64, 128, 256 or 0 (per channel)"
        raise ValueError(f"{op}: group_size must be {sizes}, got group_size={group_size}")
    kind = _facts(format)["kind"]
    if kind == "float" and (group_size or asymmetric):
        raise ValueError(
            f"{op}: a {_FORMAT_NAMES[format]} weight has no groups and no zero point, "
            f"got group_size={group_size} asymmetric={int(asymmetric)}"
        )
    if kind == "lookup" and asymmetric:
        raise ValueError(f"{op}: a {_FORMAT_NAMES[format]} weight has no zero point, got asymmetric={int(asymmetric)}")


def _check_weight(op: str, weight: Tensor, n: int, k: int, format: int, group_size: int, asymmetric: bool) -> None:
    if weight.dtype != torch.uint8:
        raise TypeError(f"{op}: weight must be packed uint8, got {name_of(weight.dtype)}")
    packed = _C.packed_shape(_C.LAYOUTS[_C.LAYOUT], n, k, format, group_size, asymmetric)
    if weight.dim() != 2 or weight.shape[0] != packed[0] or weight.shape[1] != packed[1]:
        raise ValueError(
            f"{op}: weight must have the packed shape {shape_text(packed)} of {_FORMAT_NAMES[format]} with n={n} k={k} "
            f"group_size={group_size} asymmetric={int(asymmetric)}, got {shape_text(weight.shape)}"
        )


def _check_like_y(name: str, tensor: Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> None:
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise TypeError(f"linear: {name} must have the dtype of x, got {name_of(tensor.dtype)} and {name_of(dtype)}")
    if tensor.dim() != len(shape) or any(got != wanted for got, wanted in zip(tensor.shape, shape, strict=True)):
        raise ValueError(
            f"linear: {name} must have the shape of the result {shape_text(shape)}, got {shape_text(tensor.shape)}"
        )


def _facts(format: int) -> dict[str, Any]:
    return _C.FORMAT_FACTS[_FORMAT_NAMES[format]]


def shape_text(shape: Sequence[int]) -> str:
    """A shape as errors show it, those of C++ too."""
    return "[" + ", ".join(str(size) for size in shape) + "]"


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype as errors show it."""
    return str(dtype).removeprefix("torch.")


_FAKES = {
    "linear": linear,
    "dequantize": dequantize,
    "attention_forward": attention_fakes.forward,
    "attention_backward": attention_fakes.backward,
    "decode": attention_fakes.decode,
    "kv_quantize_": attention_fakes.writes,
    "kv_dequantize_": attention_fakes.writes,
}


def fake_of(name: str) -> Callable[..., Any]:
    """Return the fake kernel of an op, called with the names of its schema: ours, or ``fake`` of the op's own file."""
    return _FAKES.get(name) or importlib.import_module(f"lowbit.ops.{name.removesuffix('_')}").fake
