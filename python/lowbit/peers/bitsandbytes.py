# SPDX-License-Identifier: Apache-2.0
"""Conversion between bitsandbytes' 4-bit and 8-bit weights and QuantLinear's. bitsandbytes need not be installed.

bitsandbytes stores a 4-bit weight ``[n, k]`` as one row of n * k codes, two per byte, the first in the high nibble,
with a scale (absmax) for each ``blocksize`` of them. In a state dict, these are next to ``weight``:
    weight.absmax             float32 [blocks], or uint8 codes if the scales are quantized too ("nested")
    weight.quant_map          float32 [16], the levels
    weight.nested_absmax      float32, one for each nested_blocksize blocks; weight.nested_quant_map float32 [256]
    weight.quant_state.bitsandbytes__nf4 or __fp4     JSON in uint8: blocksize, shape, dtype, nested_offset ...
An 8-bit weight (LLM.int8) is int8 ``[n, k]`` with SCB, float32 [n]: w = weight * SCB / 127.

Codes are kept exactly. A scale per group keeps 11 bits (a float16 fraction of a power of two per row), a scale per row
all bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats.spec import LinearSpec
from lowbit.optim import state_format
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.codes import CodedWeight, levels_of
from lowbit.quant.kinds import layout_name, weight_in, weight_name
from lowbit.quant.layout import numbers_of
from lowbit.quant.quant_linear import QuantLinear
from lowbit.tables.folding import LayerNames

_STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_LARGEST_BLOCK, _NESTED_BLOCK = 4096, 256


def from_bitsandbytes(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with bitsandbytes' weights (nf4, fp4, nested or not, and LLM.int8) converted to
    QuantLinear's.

    All other entries stay the same tensors. `lowbit.load` loads the result into the float model.

    Args:
        state_dict: the state dict of a model with Linear4bit or Linear8bitLt layers, or one read from its files.

    Raises:
        ValueError: a part of a weight is missing, or its blocks are not groups in lowbit's sense, because fewer than 32
            weights of a row share a scale. The message names the weight.

    Example:
        >>> state = from_bitsandbytes(safetensors.torch.load_file("model.safetensors"))
        >>> lowbit.load(model, state)
    """
    result = {key: value for key, value in state_dict.items() if not _is_part(key, state_dict)}
    for key in state_dict:
        name, state, format = key.partition(_STATE)
        if state:
            layer = _read_4bit(state_dict, name, format)
        elif key.endswith("SCB"):
            name = f"{key.removesuffix('SCB')}weight"
            layer = _read_8bit(state_dict, name, key)
        else:
            continue
        result[name], result[layout_name(name)] = layer.weight.detach(), layer.layout
    return result


def to_bitsandbytes(
    state_dict: Mapping[str, Tensor], *, dtype: torch.dtype = torch.bfloat16, compress_statistics: bool = False
) -> dict[str, Tensor]:
    """Return a state dict with the nf4 and fp4 weights of QuantLinear layers in bitsandbytes' form.

    Args:
        state_dict: the state dict of a model whose quantized layers are nf4 or fp4.
        dtype: the dtype that bitsandbytes dequantizes to.
        compress_statistics: whether to quantize the scales too, to 8 bits.

    Raises:
        ValueError: a packed weight has another format, or its rows are not whole blocks. The message names the weight.
    """
    result = dict(state_dict)
    for key, layout in state_dict.items():
        name = weight_name(key)
        if name not in state_dict or state_dict[name].dtype != torch.uint8:
            continue
        stored = numbers_of(layout)
        spec, n, k = stored.spec, stored.n, stored.k
        if spec.format not in ("nf4", "fp4"):
            raise ValueError(f"to_bitsandbytes: {name} must be nf4 or fp4, got {spec.name}")
        # A block is a group. With one scale per row, it is bitsandbytes' largest block size that divides k.
        block = spec.group_size or min(k & -k, _LARGEST_BLOCK)
        if k % block or block < 32:
            raise ValueError(f"to_bitsandbytes: {name}: k must be a multiple of {max(block, 32)}, got k={k}")
        weight = CodedWeight.unpack(state_dict[name], stored)
        absmax = weight.scale.repeat_interleave(k // block // spec.groups(k), dim=1).flatten()
        facts = {"quant_type": spec.format, "blocksize": block, "dtype": _text(dtype), "shape": [n, k]}
        first, second = weight.codes.view(-1, 2).unbind(1)
        del result[key]
        result[name] = (first << 4 | second)[:, None]
        result[f"{name}.quant_map"] = levels_of(spec.format)
        result |= {f"{name}.{part}": value for part, value in _nested(absmax, facts, compress_statistics).items()}
        told = list(json.dumps(facts).encode())
        result[f"{name}{_STATE}{spec.format}"] = torch.tensor(told, dtype=torch.uint8, device="cpu")
    return result


def replace_linear4bit(model: nn.Module) -> LayerNames:
    """Replace every Linear4bit of a model by a QuantLinear with the same codes, in place; return their names.

    Raises:
        ValueError: a Linear4bit is the model itself or not quantized yet, or for the reasons of `from_bitsandbytes`. No
            layer is replaced then.
    """
    names: dict[int, list[str]] = {}
    layers: dict[int, QuantLinear] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module).__name__ not in ("Linear4bit", "LinearNF4", "LinearFP4"):
            continue
        if not name or getattr(module.weight, "quant_state", None) is None:
            what = "the model itself" if not name else f"{name} without codes, which .to(device) makes"
            raise ValueError(f"replace_linear4bit: Linear4bit layers must be quantized layers of a model, got {what}")
        names.setdefault(id(module), []).append(name)
        if id(module) not in layers:
            layers[id(module)] = _layer_of_module(module, name)
    with changing_layers(model):
        for key, layer in layers.items():
            for name in names[key]:
                model.set_submodule(name, layer)
        _take_entries_out(model)
    return LayerNames(name for found in names.values() for name in found)


def _take_entries_out(model: nn.Module) -> None:
    """Remove bitsandbytes' entry from the config of transformers models that have no bitsandbytes layer any more."""
    for module in model.modules():
        quantizer = module.__dict__.get("hf_quantizer")
        theirs = quantizer is not None and quantizer.quantization_config.quant_method == "bitsandbytes"
        if theirs and not any(type(layer).__module__.startswith("bitsandbytes.") for layer in module.modules()):
            quantizer.remove_quantization_config(module)


def _layer_of_module(module: nn.Module, name: str) -> QuantLinear:
    state = from_bitsandbytes({f"{name}.{key}": value for key, value in module.state_dict().items()})
    stored = numbers_of(state[layout_name(weight_in(name))])
    bias = module._parameters.get("bias")
    layer = QuantLinear.from_packed(state[weight_in(name)], stored.n, stored.k, stored.spec, bias)
    return layer.train(module.training)


def _is_part(key: str, state_dict: Mapping[str, Tensor]) -> bool:
    """Whether this entry belongs to a weight of bitsandbytes."""
    if _STATE in key or key.endswith("SCB"):
        return True
    if key.endswith("weight_format") and f"{key.removesuffix('weight_format')}SCB" in state_dict:
        return True
    name, part = key[: key.rfind(".")], key[key.rfind(".") :]
    return part in _PARTS and any(f"{name}{_STATE}{format}" in state_dict for format in ("nf4", "fp4"))


def _read_4bit(state_dict: Mapping[str, Tensor], name: str, format: str) -> QuantLinear:
    def part(of: str) -> Tensor:
        if of not in state_dict:
            raise ValueError(f"from_bitsandbytes: {of} must be beside {name}{_STATE}{format}, and is missing")
        return state_dict[of]

    facts = json.loads(bytes(part(f"{name}{_STATE}{format}").tolist()))
    absmax = part(f"{name}.absmax")
    if absmax.dim() == 2:  # bitsandbytes 0.50 leaves [k / blocksize, n] after a forward with AVX512-BF16
        absmax = absmax.T.flatten()
    if "nested_blocksize" in facts:
        blocks = part(f"{name}.nested_absmax").repeat_interleave(facts["nested_blocksize"])[: absmax.numel()]
        absmax = part(f"{name}.nested_quant_map")[absmax.int()] * blocks + facts["nested_offset"]
    n, k = facts["shape"]
    return layer_of_blocks(part(name), absmax, n, k, facts["blocksize"], format, name)


def layer_of_blocks(
    packed: Tensor, absmax: Tensor, n: int, k: int, blocksize: int, format: str, name: str = "weight"
) -> QuantLinear:
    """Return a layer without bias from bitsandbytes' bytes of a weight ``[n, k]``.

    Args:
        packed: codes, two per byte, the first in the high nibble, in any storage dtype (``quant_storage``).
        absmax: float32 ``[ceil(n * k / blocksize)]``.
        n: the number of rows.
        k: the number of columns.
        blocksize: the number of codes per scale.
        format: "nf4" or "fp4".
        name: the name of the weight, for errors.
    """
    per_row = blocksize % k == 0
    group = k if per_row else min(math.gcd(k, blocksize), 256)
    if not per_row and group < 32:
        raise ValueError(
            f"from_bitsandbytes: {name}: 32 weights of a row or more must share a scale, "
            f"got k={k} in blocks of {blocksize}; dequantize it and quantize the result"
        )
    pairs = packed.contiguous().view(torch.uint8).flatten()
    wanted = -(-n * k // 2), -(-n * k // blocksize)
    if (pairs.numel(), absmax.numel()) != wanted:
        raise ValueError(
            f"from_bitsandbytes: {name}: n={n} k={k} in blocks of {blocksize} must be {wanted[0]} bytes and "
            f"{wanted[1]} scales, got {pairs.numel()} and {absmax.numel()}"
        )
    codes = torch.stack((pairs >> 4, pairs & 15), dim=1).flatten()[: n * k].view(n, k)
    rows, columns = torch.arange(n, device=codes.device), torch.arange(0, k, group, device=codes.device)
    begins = rows[:, None] * k + columns
    spec = LinearSpec(format, 0 if per_row else group)
    return QuantLinear.pack(codes, absmax.float()[begins // blocksize], None, spec)


def _read_8bit(state_dict: Mapping[str, Tensor], name: str, key: str) -> QuantLinear:
    weight, scale = state_dict.get(name), state_dict[key]
    if weight is None or weight.dtype != torch.int8 or weight.dim() != 2:
        got = "none" if weight is None else f"{_text(weight.dtype)} {list(weight.shape)}"
        raise ValueError(f"from_bitsandbytes: {name} must be int8 [n, k] beside {key}, got {got}")
    codes = weight.view(torch.uint8) ^ 128
    return QuantLinear.pack(codes, scale.float().view(-1, 1) / 127, None, LinearSpec("int8"))


def _nested(absmax: Tensor, facts: dict[str, Any], compress: bool) -> dict[str, Tensor]:
    """Return the scales unchanged, or as codes of bitsandbytes' dynamic map, with its parameters added to ``facts``."""
    if not compress:
        return {"absmax": absmax}
    offset = absmax.mean()
    facts |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset.item()}
    values = (absmax - offset).cpu()
    codes, scale = state_format.encode(values, _nested_layout(values), is_signed=True)
    every_code = torch.arange(256, dtype=torch.uint8, device="cpu")
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    levels = state_format.decode(every_code, one, _nested_layout(every_code), is_signed=True)
    nested = {"absmax": codes, "nested_absmax": scale, "nested_quant_map": levels}
    return {name: value.to(absmax.device) for name, value in nested.items()}


def _nested_layout(values: Tensor) -> state_format.Layout:
    return state_format.Layout.of(values, "dynamic8", _NESTED_BLOCK)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
