# SPDX-License-Identifier: Apache-2.0
"""Packed weights in the formats of compressed-tensors (methods/compressed_tensors.py), as vLLM, transformers and
llm-compressor read them.

    integers, float activations      pack-quantized
    integers, int8 activations       int-quantized
    float8                           float-quantized
    e2m1 codes in groups of 16, 32   nvfp4-pack-quantized, mxfp4-pack-quantized

Layers with equal settings are a group of ``config_groups``. The largest group has the target "Linear", the others the
names of their layers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoints.writers.writer import CodedLayer, Writer, holds, words

_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_ACTIVATIONS = {
    "int8_row": _TOKEN,
    "int8_row_asymmetric": _TOKEN | {"symmetric": False},
    "float8_row": _TOKEN | {"type": "float"},
}
"""How activations are rounded, where the package has a word for it. It has none for int8 by group."""
_BLOCK = 128
_EXPONENTS = range(255)  # of e8m0; 255 is nan


class CompressedTensorsWriter(Writer):
    """Writer of integers, float8, NVFP4 and MXFP4."""

    name = "compressed-tensors"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.groups: dict[str, dict[str, Any]] = {}  # the settings of each layer
        self.dtypes: dict[str, torch.dtype] = {}  # of the scales of each layer
        self.paths: dict[str, str] = {}

    def add(self, layer: CodedLayer) -> None:
        if layer.permutation is not None:
            raise self.error(layer, "act order has been removed from the package; gptq has it")
        group = self._group(layer)
        if group["format"] == "nvfp4-pack-quantized":
            self._check_nvfp4(layer)
        elif group["format"] == "mxfp4-pack-quantized":
            self._check_mxfp4(layer)
        else:
            self.check_zero_points(layer, 2**layer.bits - 1)
            self.dtypes[layer.name] = self._dtype(layer)
        self.groups[layer.name], self.paths[layer.name] = group, layer.path

    def _group(self, layer: CodedLayer) -> dict[str, Any]:
        """Return the settings of a layer."""
        spec, size = layer.coded.spec, self.group_size(layer)
        activations = _ACTIVATIONS.get(spec.x_format)
        weights = {"num_bits": layer.bits, "type": "int", "symmetric": not spec.asymmetric, "dynamic": False}
        weights |= {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
        if spec.format == "fp4_e2m1" and size in (16, 32):
            format = "nvfp4-pack-quantized" if size == 16 else "mxfp4-pack-quantized"
            weights |= {"type": "float"} | ({"strategy": "tensor_group"} if size == 16 else {})
        elif spec.format == "fp8_e4m3":
            format = "float-quantized"
            weights |= {"type": "float"}
            if size == _BLOCK and _is_of_blocks(layer.scale):
                del weights["group_size"]
                weights |= {"strategy": "block", "block_structure": [_BLOCK, _BLOCK]}
        elif spec.format in {f"int{bits}" for bits in range(2, 9)}:
            format = "pack-quantized" if activations is None else "int-quantized"
        else:
            raise self.error(layer, "it has no such codes")
        return {"weights": weights, "input_activations": activations, "output_activations": None, "format": format}

    def _dtype(self, layer: CodedLayer) -> torch.dtype:
        """Return the dtype of the scales: that of the model, if it holds them."""
        choices = (self.dtype, torch.float16, torch.bfloat16, torch.float32)
        found = next((dtype for dtype in choices if holds(dtype, layer.scale)), None)
        if found is None:
            raise self.error(layer, "its scales are no float32")
        return found

    def _check_nvfp4(self, layer: CodedLayer) -> None:
        coded = layer.coded
        column, group = coded.column_scale, coded.group_scale
        if not (column == column[0]).all() or not holds(torch.float8_e4m3fn, group.double()):
            raise self.error(layer, "its scales are no float8 times one number of the whole weight")
        if _divisor(column[0]) is None:
            raise self.error(layer, f"the scale of the whole weight, {float(column[0])!r}, is 1 / x of no float32")

    def _check_mxfp4(self, layer: CodedLayer) -> None:
        power = _exponents(layer.scale)
        if power is None or int(power.min()) not in _EXPONENTS or int(power.max()) not in _EXPONENTS:
            raise self.error(layer, "its scales are no powers of two from 2^-127 to 2^127")

    def tensors(self, layer: CodedLayer) -> dict[str, Tensor]:
        group, coded, scale = self.groups[layer.name], layer.coded, layer.scale
        if group["format"] == "nvfp4-pack-quantized":
            meta = scale.is_meta
            divisor = torch.empty(1, device="meta") if meta else _divisor(coded.column_scale[0]).reshape(1)
            scales = {".weight_scale": coded.group_scale.to(torch.float8_e4m3fn), ".weight_global_scale": divisor}
            return {".weight_packed": _pairs(coded.codes)} | scales
        if group["format"] == "mxfp4-pack-quantized":
            power = scale if scale.is_meta else _exponents(scale)
            return {".weight_packed": _pairs(coded.codes), ".weight_scale": power.to(torch.uint8)}
        if group["weights"]["strategy"] == "block":
            scale = scale[::_BLOCK]
        scale = scale.to(self.dtypes[layer.name]).contiguous()
        if group["weights"]["type"] == "float":
            return {".weight": coded.codes.view(torch.float8_e4m3fn), ".weight_scale": scale}
        packed = group["format"] == "pack-quantized"
        made = (_packed if packed else _plain)(layer, None if coded.zero is None else layer.zero_points())
        return made | {".weight_scale": scale}

    def settings(self, floats: Sequence[str]) -> dict[str, Any]:
        alike: dict[str, list[str]] = defaultdict(list)
        for name, group in self.groups.items():
            alike[json.dumps(group)].append(name)
        ordered = sorted(alike.items(), key=lambda item: -len(item[1]))
        groups = {}
        for number, (text, names) in enumerate(ordered):
            targets = (
                [*dict.fromkeys(each for name in names for each in (name, self.paths[name]))] if number else ["Linear"]
            )
            groups[f"group_{number}"] = {"targets": targets} | json.loads(text)
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": self.name,
            "quantization_status": "compressed",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "config_groups": groups,
            "ignore": [*floats],
            "kv_cache_scheme": None,
        }


def _packed(layer: CodedLayer, zero: Tensor | None) -> dict[str, Tensor]:
    bits, shape = layer.bits, torch.tensor([layer.n, layer.k], dtype=torch.int64, device="cpu")
    made = {".weight_packed": words(layer.coded.codes, bits), ".weight_shape": shape}
    return made if zero is None else made | {".weight_zero_point": words(zero.t().contiguous(), bits).t().contiguous()}


def _plain(layer: CodedLayer, zero: Tensor | None) -> dict[str, Tensor]:
    signed = (layer.coded.codes.to(torch.int16) - layer.middle).to(torch.int8)
    made = {".weight": signed}
    return made if zero is None else made | {".weight_zero_point": (zero.to(torch.int16) - layer.middle).to(torch.int8)}


def _pairs(codes: Tensor) -> Tensor:
    """Return two codes of 4 bits to a byte, the first in the low nibble."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _is_of_blocks(scale: Tensor) -> bool:
    """Return whether 128 neighbouring rows have equal scales."""
    return torch.equal(scale, scale[::_BLOCK].repeat_interleave(_BLOCK, 0)[: len(scale)])


def _divisor(whole: Tensor) -> Tensor | None:
    """Return a float32 whose inverse, rounded to float32, is this number, or None."""
    near = (1 / whole.double()).float()
    for step in (0, 1, -1):
        divisor = (near.view(torch.int32) + step).view(torch.float32)
        if (1 / divisor.double()).float() == whole:
            return divisor
    return None


def _exponents(scale: Tensor) -> Tensor | None:
    """Return scales as exponents of two plus 127, or None if they are no powers. A scale of 0, whose codes are 0, gets
    the largest of its row."""
    fraction, exponent = torch.frexp(scale)
    if not ((fraction == 0.5) | (scale == 0)).all():
        return None
    power = torch.where(scale == 0, -1024, exponent + 126)
    largest = power.amax(1, keepdim=True)
    return torch.where(power == -1024, torch.where(largest == -1024, 127, largest), power)
