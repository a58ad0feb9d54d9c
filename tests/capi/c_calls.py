# SPDX-License-Identifier: Apache-2.0
"""Functions of lowbit/lowbit.h for tests: ctypes, with tensors of torch in the place of pointers."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit import _C

LIBRARY = ctypes.CDLL(str(Path(_C.__file__).with_name("liblowbit.so")))
LIBRARY.lowbit_last_error.restype = ctypes.c_char_p
STATUS = {"value": 1, "type": 2, "index": 3, "not implemented": 4, "runtime": 5}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool]
INT32, INT64, DOUBLE, POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class CTensor(ctypes.Structure):
    _fields_ = [("data", POINTER), ("shape", POINTER), ("stride", POINTER), ("rank", INT32), ("dtype", INT32)]


def c_tensor(tensor: Tensor, **changed: Any) -> CTensor:
    shape, stride = ((INT64 * tensor.dim())(*numbers) for numbers in (tensor.shape, tensor.stride()))
    result = CTensor(tensor.data_ptr(), ctypes.addressof(shape), ctypes.addressof(stride), tensor.dim(), DTYPES.index(tensor.dtype))
    result.kept = tensor, shape, stride
    for name, value in changed.items():
        setattr(result, name, value)
    return result


class CWeight(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("data", POINTER), ("bytes", INT64), ("n", INT64), ("k", INT64)]
    _fields_ += [("group_size", INT64), ("format", INT32), ("asymmetric", INT32), ("layout", INT32)]


def c_weight(packed: Tensor | None, n: int, k: int, format: int, group_size: int = 0, asymmetric: bool = False, layout: int = 0) -> CWeight:
    data, count = (None, 0) if packed is None else (packed.data_ptr(), packed.nbytes)
    weight = CWeight(ctypes.sizeof(CWeight), data, count, n, k, group_size, format, asymmetric, layout)
    weight.kept = packed
    return weight


_FIELDS = {
    "quantize": [("mapping", INT32), ("scale_choice", INT32), ("importance", POINTER)],
    "linear": [("x_format", INT32), ("activation", INT32), ("bias", POINTER), ("mul", POINTER), ("add", POINTER)],
    "experts": [("gate_up_x_format", INT32), ("down_x_format", INT32), ("activation", INT32), ("no_gate", INT32), ("interleaved", INT32),
                ("alpha", DOUBLE), ("limit", DOUBLE), ("up_offset", DOUBLE), ("gate_up_bias", POINTER), ("down_bias", POINTER)],
    "attention_forward": [("scale", DOUBLE), ("causal", INT32), ("mask", POINTER), ("sink", POINTER), ("lse", POINTER)],
    "decode": [("scale", DOUBLE), ("k_scale", POINTER), ("v_scale", POINTER), ("rotated", INT32), ("causal", INT32), ("window", INT64),
               ("mask", POINTER), ("sink", POINTER)],
    "rms_norm": [("offset", DOUBLE), ("add", POINTER)],
    "rope_append": [("q_weight", POINTER), ("k_weight", POINTER), ("eps", DOUBLE), ("offset", DOUBLE)],
}  # fmt: skip
OPTIONS = {
    name: type(name, (ctypes.Structure,), {"_fields_": [("struct_size", ctypes.c_size_t), *fields]}) for name, fields in _FIELDS.items()
}


def options(name: str, **given: Any) -> ctypes.Structure:
    """The options of a function; tensors become pointers to their structs."""
    result = OPTIONS[name](given.pop("struct_size", ctypes.sizeof(OPTIONS[name])))
    result.kept = {}
    for field, value in given.items():
        if isinstance(value, Tensor):
            value = c_tensor(value)
        if isinstance(value, CTensor):
            result.kept[field] = value
            value = ctypes.addressof(value)
        setattr(result, field, value)
    return result


def status(name: str, *arguments: Any) -> int:
    """Call lowbit_<name>; tensors and structs by address, float as double, int as int64 (which is an int32 in a register too)."""
    passed = []
    for value in arguments:
        if isinstance(value, Tensor):
            value = c_tensor(value)
        if isinstance(value, ctypes.Structure):
            value = ctypes.pointer(value)
        passed.append(DOUBLE(value) if isinstance(value, float) else INT64(value) if isinstance(value, int) else value)
    return getattr(LIBRARY, f"lowbit_{name}")(*passed)


def last_error() -> str:
    return LIBRARY.lowbit_last_error().decode()


def call(name: str, *arguments: Any) -> None:
    """Call lowbit_<name>, which must succeed."""
    assert status(name, *arguments) == 0, last_error()
