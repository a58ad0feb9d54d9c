# SPDX-License-Identifier: Apache-2.0
"""torchao: weights of its tensor classes as QuantLinear holds them, code by code. It need not be imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.spec import LinearSpec
from lowbit.integrations.bitsandbytes import layer_of_blocks
from lowbit.integrations.microscaling import from_nvfp4
from lowbit.quant.quant_linear import QuantLinear


def from_torchao(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with torchao's NF4Tensor, Float8Tensor and NVFP4Tensor weights ``[n, k]`` as QuantLinear's.

    All other entries are the tensors that they were. `lowbit.load` takes it into the float model. Codes stay what they
    are; torchao's table of nf4 is rounded to 4 decimals, ours is the exact one.

    Raises:
        ValueError: a weight is not ``[n, k]`` with a scale per row, or per 32 of its neighbours or more (NVFP4: 16), or
            its scales are swizzled. Names it.

    Example:
        >>> lowbit.load(model, from_torchao(torch.load("torchao.pt")))
    """
    result = dict(state_dict)
    for key, weight in state_dict.items():
        read = _READERS.get(type(weight).__name__)
        if read is None or not type(weight).__module__.startswith("torchao."):
            continue
        if weight.dim() != 2 or not key.endswith("weight"):
            shape = list(weight.shape)
            raise ValueError(f"from_torchao: {key} must be the weight [n, k] of a linear layer, got {shape}")
        layer = read(weight, key)
        result[key] = layer.weight.detach()
        result[f"{key.removesuffix('weight')}layout"] = layer.layout
    return result


def _nf4(weight: Any, key: str) -> QuantLinear:
    n, k = weight.shape
    factors = weight.quantization_factor.repeat_interleave(weight.scaler_block_size)
    absmax = (weight.quantized_scalers / factors).to(weight.dtype) + weight.scaler_mean
    return layer_of_blocks(weight.quantized_data, absmax, n, k, weight.block_size, "nf4", key)


def _float8(weight: Any, key: str) -> QuantLinear:
    (n, k), block = weight.shape, list(weight.block_size)
    dtype = weight.qdata.dtype
    if dtype != torch.float8_e4m3fn or block != [1, k]:
        wanted = "float8_e4m3fn with a scale per row"
        raise ValueError(f"from_torchao: {key} must be {wanted}, got {dtype} in blocks of {block}")
    codes = weight.qdata.contiguous().view(torch.uint8)
    return QuantLinear.pack(codes, weight.scale.float().view(n, 1), None, LinearSpec("fp8_e4m3"))


def _nvfp4(weight: Any, key: str) -> QuantLinear:
    if weight.is_swizzled_scales:
        raise ValueError(f"from_torchao: {key} must have its scales in order, got swizzled ones")
    whole = 1.0 if weight.per_tensor_scale is None else weight.per_tensor_scale
    return from_nvfp4(weight.qdata.view(torch.uint8), weight.scale.view(torch.float8_e4m3fn), whole)


_READERS: dict[str, Callable[[Any, str], QuantLinear]] = {
    "NF4Tensor": _nf4,
    "Float8Tensor": _float8,
    "NVFP4Tensor": _nvfp4,
}
