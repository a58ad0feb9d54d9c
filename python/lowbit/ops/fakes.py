# SPDX-License-Identifier: Apache-2.0
"""Fake kernels: shape, dtype and strides of each op's result, for tracing without data.

`registration` runs the checks of csrc/ops first. Results are always contiguous, since Inductor asserts exact strides.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.ops import attention_fakes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of activations, biases, and weights to quantize."""


def described(value: Any) -> Any:
    """Return an argument of an op in the form that `_C.check_call` takes: a tensor as dtype and shape, a symbolic
    number as its hint from tracing, or 1 if it has none."""
    if isinstance(value, Tensor):
        return name_of(value.dtype), [described(size) for size in value.shape]
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    while isinstance(value, (torch.SymInt, torch.SymFloat)):
        value = 1 if value.node.hint is None else value.node.hint  # reading the hint adds no guard
    return value


def is_open(value: Any) -> bool:
    """Return whether the argument contains a symbolic number whose value is unknown before run time."""
    if isinstance(value, (Tensor, list, tuple)):
        return any(map(is_open, value.shape if isinstance(value, Tensor) else value))
    return isinstance(value, (torch.SymInt, torch.SymFloat)) and value.node.hint is None


def linear(x: Tensor, n: int, **_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def dequantize(weight: Tensor, n: int, k: int, like: Tensor | None, **_: Any) -> Tensor:
    return weight.new_empty((n, k), dtype=torch.float32 if like is None else like.dtype)


def embedding(weight: Tensor, indices: Tensor, like: Tensor, k: int, **_: Any) -> Tensor:
    return weight.new_empty((*indices.shape, k), dtype=like.dtype)


def fake_quantize(weight: Tensor, group_size: int, codes: bool, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    n, k = weight.shape
    scale = weight.new_empty((n, -(-k // group_size) if group_size else 1), dtype=torch.float32)
    return weight.new_empty((n, k), dtype=torch.uint8 if codes else weight.dtype), scale, torch.empty_like(scale)


def fake_quantize_backward(scale: Tensor, scale_wanted: bool, **_: Any) -> Tensor:
    n, groups = scale.shape
    return scale.new_empty((n if scale_wanted else 0, groups))


def fake_quantize_activations(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)


def float8_cast(x: Tensor, dim: int, bfloat16: bool, **_: Any) -> tuple[Tensor, Tensor]:
    divisor = x.new_empty((x.shape[0] if dim == 1 else 1, x.shape[1] if dim == 0 else 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.bfloat16 if bfloat16 else torch.float32), divisor


def int8_pack(weight: Tensor, **_: Any) -> Tensor:
    n, k = weight.shape
    panels, tiles = -(-n // 16), -(-k // 64)  # 128 bytes of scales and sums, then tiles of 16 x 64 bytes
    return weight.new_empty((panels, 128 + 1024 * tiles), dtype=torch.uint8)


def scan_in_place(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype for error messages."""
    return str(dtype).removeprefix("torch.")


_FAKES = {
    "linear": linear,
    "dequantize": dequantize,
    "embedding": embedding,
    "fake_quantize": fake_quantize,
    "fake_quantize_backward_": fake_quantize_backward,
    "fake_quantize_activations": fake_quantize_activations,
    "float8_cast": float8_cast,
    "int8_pack": int8_pack,
    "attention_forward": attention_fakes.forward,
    "attention_backward": attention_fakes.backward,
    "decode": attention_fakes.decode,
    "kv_quantize_": attention_fakes.writes,
    "kv_dequantize_": attention_fakes.writes,
    "ssd_": scan_in_place,
    "selective_scan_": scan_in_place,
}


def fake_of(name: str) -> Callable[..., Any]:
    """Return the fake kernel of an op, from this file or ``fake`` in the op's file. It takes the arguments of the
    schema by name."""
    return _FAKES.get(name) or importlib.import_module(f"lowbit.ops.{name.removesuffix('_')}").fake
