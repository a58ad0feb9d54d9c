# SPDX-License-Identifier: Apache-2.0
"""Conversion of torchao's tensor classes to QuantLinear weights, code by code. torchao need not be imported."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lowbit import _C
from lowbit.checkpoints.microscaling import from_nvfp4
from lowbit.formats.base import granularity_of, require, x_format_of
from lowbit.formats.intx import int_format_of
from lowbit.formats.spec import LinearSpec
from lowbit.peers.bitsandbytes import layer_of_blocks
from lowbit.peers.torchao.stored import Stored, stored_tensors
from lowbit.quant.kinds import layer_with, layout_name
from lowbit.quant.quant_linear import QuantLinear

_NOT_HERE = ("act_pre_scale", "act_quant_scale", "act_quant_zero_point")
_LARGEST_GROUP, _SMALLEST_GROUP = 256, 32
_ZERO_ERROR = 2.0**-7  # in steps of a scale: float16 zero points have a spacing of 2^-7 between 8 and 16


def from_torchao(state_dict: Mapping[str, Tensor] | str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return a state dict with the weights ``[n, k]`` of torchao's tensor classes converted to QuantLinear's.

    Supported are NF4Tensor, Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor (2 to 8 bits), Int4Tensor and
    NVFP4Tensor. All other entries stay the same tensors. `lowbit.load` loads the result into the float model.

    Codes are kept exactly; torchao's nf4 table is rounded to 4 decimals, lowbit's is exact. A scale per group keeps 11
    bits, one per row or per tensor all bits. The zero points of an Int4Tensor are floats, and are off by at most 1/128
    of a step. Activations are treated as the weight specifies: unquantized, or int8 or float8 per row (those of an
    NVFP4Tensor are unquantized).

    Args:
        state_dict: the state dict of a model that torchao quantized, or the path of a safetensors file of torchao
            (``flatten_tensor_state_dict``) or of a folder of them that transformers' ``save_pretrained`` wrote. Reading
            files does not require torchao.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a weight is of another class or not ``[n, k]``, fewer than 32 neighbours of a row share a scale
            (NVFP4: 16), it has static or per-tensor scales for activations, or its scales are swizzled (the message
            names the weight); or a file is not torchao's or lacks a part of a weight.

    Example:
        >>> lowbit.load(model, from_torchao(torch.load("torchao.pt")))
        >>> lowbit.load(model, from_torchao("model.safetensors"))
    """
    given = state_dict.items() if isinstance(state_dict, Mapping) else stored_tensors(Path(state_dict))
    result: dict[str, Tensor] = {}
    for key, weight in given:
        if not isinstance(weight, Stored) and not type(weight).__module__.startswith("torchao."):
            result[key] = weight
            continue
        kind = type(weight).__name__
        if kind not in _READERS:
            raise ValueError(
                f"from_torchao: {key} must be one of {', '.join(_READERS)}, got {kind}; call torchao's dequantize() "
                f"on it and quantize the result"
            )
        matrix = getattr(weight, "qdata", weight)
        if matrix.dim() != 2 or layer_with(key) is None:
            shape = list(matrix.shape)
            raise ValueError(f"from_torchao: {key} must be the weight [n, k] of a linear layer, got {shape}")
        for part in _NOT_HERE:
            if getattr(weight, part, None) is not None:
                raise ValueError(f"from_torchao: {key} must have no {part}, got one with fixed values")
        layer = _READERS[kind](weight, key)
        result[key] = layer.weight.detach()
        result[layout_name(key)] = layer.layout
    return result


def _nf4(weight: Any, key: str) -> QuantLinear:
    n, k = weight.shape
    factors = weight.quantization_factor.repeat_interleave(weight.scaler_block_size)
    absmax = (weight.quantized_scalers / factors).to(weight.dtype) + weight.scaler_mean
    return layer_of_blocks(weight.quantized_data, absmax, n, k, weight.block_size, "nf4", key)


def _float8(weight: Any, key: str) -> QuantLinear:
    dtype = weight.qdata.dtype
    if dtype != torch.float8_e4m3fn:
        raise ValueError(f"from_torchao: {key} must be float8_e4m3fn, got {dtype}")
    group_size = _group_size(weight, key)
    codes, scale = weight.qdata.contiguous().view(torch.uint8), _in_groups(weight.scale, weight, group_size, key)
    act = weight.act_quant_kwargs
    if act is not None:
        _check_per_row(act, key)
    x_format = "float" if act is None else "float8_row"
    return QuantLinear.pack(codes, scale, None, LinearSpec("fp8_e4m3", group_size, x_format=x_format))


def _int8(weight: Any, key: str) -> QuantLinear:
    act = weight.act_quant_kwargs
    if act is None:
        return _integers(weight, key, "int8")
    _check_per_row(act, key)
    require("from_torchao", f"reduce_range of {key}", act.reduce_range, False, "the product is exact without")
    return _integers(weight, key, "int8", x_format_of(f"from_torchao: {key}", 0, 0, act.mapping_type))


def _intx(weight: Any, key: str) -> QuantLinear:
    format = int_format_of(f"from_torchao: {key}", weight.target_dtype)
    known, act = "int8_asym_per_token", weight.activation_quantization
    if act is not None and str(getattr(act, "value", act)).lower() != known:  # in a file, the name of the enum member
        raise ValueError(f"from_torchao: activation_quantization of {key} must be {known} or None, got {act}")
    return _integers(weight, key, format, "float" if act is None else "int8_row_asymmetric")


def _int4(weight: Any, key: str) -> QuantLinear:
    """Return the layer of an Int4Tensor: w = scale * q + zero_point, with q from -8 to 7, two per byte, the first in
    the low nibble; scales are ``[groups, n]``."""
    act = getattr(weight, "activation_dtype", torch.bfloat16)
    require("from_torchao", f"activation_dtype of {key}", act, torch.bfloat16, "activations are taken as they come")
    packed = weight.qdata.contiguous().view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1) ^ 8
    plain = SimpleNamespace(qdata=codes, block_size=weight.block_size)
    group_size = _group_size(plain, key)
    scale, added = (_in_groups(part.t(), plain, group_size, key) for part in (weight.scale, weight.zero_point))
    if not (added != 0).any():
        return QuantLinear.pack(codes, scale, None, LinearSpec("int4", group_size))
    zeros = 8 - added / scale
    if not ((zeros.half() - zeros).abs() <= _ZERO_ERROR).all():
        raise ValueError(
            f"from_torchao: {key}: the range of each group must contain 0 or be near it, got a group whose middle is "
            f"{float((zeros - 8).abs().nan_to_num(torch.inf).max()):.3g} steps from 0"
        )
    return QuantLinear.pack(codes, scale, zeros, LinearSpec("int4", group_size, True, "float", "asymmetric"))


def _check_per_row(act: Any, key: str) -> None:
    name = f"granularity of the activations of {key}"
    group_size = granularity_of("from_torchao", name, act.granularity)
    require("from_torchao", name, group_size, 0, "a scale per row")


def _integers(weight: Any, key: str, format: str, x_format: str = "float") -> QuantLinear:
    """Return the layer of signed codes, w = scale * (code - zero_point). lowbit's codes are unsigned."""
    middle = (_C.FORMAT_FACTS[format]["code_max"] + 1) // 2
    group_size = _group_size(weight, key)
    codes = (weight.qdata.short() + middle).to(torch.uint8)
    scale, zero = _in_groups(weight.scale, weight, group_size, key), getattr(weight, "zero_point", None)
    asymmetric = zero is not None and bool((zero != 0).any())
    zeros = _in_groups(zero, weight, group_size, key) + middle if asymmetric else None
    spec = LinearSpec(format, group_size, asymmetric, x_format, "asymmetric" if asymmetric else "symmetric")
    return QuantLinear.pack(codes, scale, zeros, spec)


def _group_size(weight: Any, key: str) -> int:
    """Return the group size in lowbit: the block along k or a divisor of it, or 0 for a whole row."""
    along_k = weight.block_size[1]
    if along_k == weight.qdata.shape[1]:
        return 0
    group_size = math.gcd(along_k, _LARGEST_GROUP)
    if group_size < _SMALLEST_GROUP:
        raise ValueError(
            f"from_torchao: {key}: 32 weights of a row or more must share a scale, "
            f"got blocks of {list(weight.block_size)}"
        )
    return group_size


def _in_groups(part: Tensor, weight: Any, group_size: int, key: str) -> Tensor:
    """Return one number per row and group, float32 ``[n, groups]``, from one per block."""
    (n, k), (rows, along_k) = weight.qdata.shape, weight.block_size
    if n % rows or k % along_k or part.numel() != (n // rows) * (k // along_k):
        raise ValueError(
            f"from_torchao: {key}: n={n} k={k} must have one scale for each block of {[rows, along_k]}, "
            f"got {part.numel()}"
        )
    blocks = part.float().reshape(n // rows, k // along_k).repeat_interleave(rows, 0)
    return blocks.repeat_interleave(along_k // (group_size or along_k), 1).contiguous()


def _nvfp4(weight: Any, key: str) -> QuantLinear:
    if weight.is_swizzled_scales:
        raise ValueError(f"from_torchao: {key} must have its scales in order, got swizzled ones")
    whole = getattr(weight, "per_tensor_scale", None)
    codes, scale = weight.qdata.view(torch.uint8), weight.scale.view(torch.float8_e4m3fn)
    return from_nvfp4(codes, scale, 1.0 if whole is None else whole)


_READERS: dict[str, Callable[[Any, str], QuantLinear]] = {
    "NF4Tensor": _nf4,
    "Float8Tensor": _float8,
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Int4Tensor": _int4,
    "NVFP4Tensor": _nvfp4,
}
