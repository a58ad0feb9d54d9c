# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of llm-compressor and vLLM: quant_method "compressed-tensors".

    weight_packed        int32 [n, words]: signed codes plus 2^(bits - 1), the first lowest: a stream of bits, or
                         before compressed-tensors 0.20 whole codes, 32 // bits to a word
                         uint8 [n, k / 2] in the formats of e2m1: two codes to a byte, the first lowest
    weight               int8 or float8_e4m3fn [n, k] in the other formats
    weight_scale         one number, [n, 1], [n, groups], or one per block; e4m3 in nvfp4, e8m0 in mxfp4 and mxfp8
    weight_zero_point    signed; in pack-quantized packed along n
    weight_global_scale  of nvfp4, a number that divides
    weight_g_idx         int32 [k], the group of each input
    weight_shape         [n, k]

``config_groups`` say what the codes are, for the layers that ``targets`` name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoints.methods.fp4 import mxfp4_codes, nvfp4_codes, powers
from lowbit.checkpoints.methods.method import (
    CONFIG,
    LayerCodes,
    LayerTensors,
    Method,
    float8_codes,
    inputs_by_group,
    scale_of_blocks,
)
from lowbit.quant.codes import bit_stream, codes_of
from lowbit.quant.layout import text_of

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
_CLASS = "Linear"


class CompressedTensorsMethod(Method):
    """Reader of the formats of compressed-tensors."""

    name = "compressed-tensors"
    parts = (
        ".weight_packed", ".weight", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape",
        ".weight_global_scale", ".input_scale", ".input_zero_point", ".input_global_scale",
    )  # fmt: skip
    marks = (".weight_packed", ".weight_scale")
    ignored = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".output_scale")

    def __init__(self, settings: Mapping[str, Any], activations: str | None) -> None:
        super().__init__(settings, activations)
        sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise ValueError(
                f"{CONFIG}: sparsity_config of {self.name} must be dense, got format {sparsity!r}, which stores the "
                "places of nonzero weights; compressed-tensors decompresses it"
            )
        if settings.get("transform_config"):
            raise ValueError(
                f"{CONFIG}: transform_config of {self.name} must be empty, got rotations of activations, which lowbit "
                "does not apply"
            )
        self.groups = settings.get("config_groups")
        if not isinstance(self.groups, Mapping) or not self.groups:
            raise ValueError(f"{CONFIG}: config_groups of {self.name} must name groups of layers, got {self.groups!r}")
        for name, group in self.groups.items():
            if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
                raise ValueError(f"{CONFIG}: {name} of config_groups must have weights, got {group!r}")
            self._format(group)

    def read(self, layer: LayerTensors) -> LayerCodes:
        group = self._group_of(layer)
        weights, format = group["weights"], self._format(group)
        if format == "nvfp4-pack-quantized":
            whole = 1 / layer.scales(".weight_global_scale", (1,)).double()
            return nvfp4_codes(self, layer, ".weight_packed", ".weight_scale", whole)
        if format == "mxfp4-pack-quantized":
            return mxfp4_codes(self, layer, ".weight_packed", ".weight_scale")
        bits, type = weights.get("num_bits"), weights.get("type", "int")
        packed = format == "pack-quantized"
        if type == "float" and bits == 8:
            codes, zero, named = float8_codes(layer, ".weight"), None, "fp8_e4m3"
        elif type == "int" and bits in range(2, 9):
            codes, zero = (_packed_codes if packed else _plain_codes)(layer, bits, not weights.get("symmetric", True))
            named = f"int{bits}"
        else:
            raise ValueError(
                f"{CONFIG}: weights of {layer.name} must be int of 2 to 8 bits or float of 8, got {weights}"
            )
        rows, width = _block(layer, weights)
        if format == "mxfp8-quantized":
            scale = torch.exp2(powers(layer, ".weight_scale", (layer.n, layer.k // width)).double() - 127).float()
        else:
            scale = scale_of_blocks(layer, ".weight_scale", rows, width)
        permutation = _permutation(layer, width)
        if permutation is not None:
            codes = (codes_of(codes, layer.k, bits) if packed else codes)[:, permutation]
        zero = None if zero is None else zero.expand(layer.n, -1)
        meant = self._activations(layer, group.get("input_activations"), type)
        return self.codes(codes, scale, zero, named, width, layer, meant=meant, permutation=permutation)

    def _format(self, group: Mapping[str, Any]) -> str:
        format = group.get("format") or self.settings.get("format")
        if format not in _FORMATS:
            raise ValueError(f"{CONFIG}: format of {self.name} must be one of {', '.join(_FORMATS)}, got {format!r}")
        return format

    def _group_of(self, layer: LayerTensors) -> Mapping[str, Any]:
        """Return the group whose targets name a layer: by its name, by a pattern, or all linear layers."""
        name = layer.name.removesuffix(".weight")
        found: dict[int, Mapping[str, Any]] = {}
        for group in self.groups.values():
            for target in group.get("targets") or ():
                regex = target.removeprefix("re:")
                if target == name:
                    found.setdefault(0, group)
                elif regex != target and re.match(regex, name):
                    found.setdefault(1, group)
                elif target == _CLASS:
                    found.setdefault(2, group)
        if not found:
            told = ", ".join(str(group.get("targets")) for group in self.groups.values())
            raise ValueError(f"{CONFIG}: targets must name {name}, which has codes in the files, got {told}")
        return found[min(found)]

    def _activations(self, layer: LayerTensors, given: Mapping[str, Any] | None, type: str) -> str:
        """Return how activations are rounded: one scale per row, of those that the method has."""
        if not given or self.activations is not None:
            return "float"
        dynamic, bits, strategy = given.get("dynamic"), given.get("num_bits"), given.get("strategy", "tensor")
        if bits != 8 or given.get("type", "int") != type:
            raise ValueError(
                f"{CONFIG}: input_activations of {layer.name} must be 8 bits of the type of its weights, got {given}; "
                "LowbitConfig('checkpoint', activations='float') leaves them"
            )
        if dynamic is not True:
            raise ValueError(
                f"{CONFIG}: input_activations of {layer.name} must be dynamic, got a fixed scale; "
                f"LowbitConfig('checkpoint', activations={'float' if type == 'float' else 'int8'!r}) is without it"
            )
        if strategy not in ("token", "tensor"):  # groups: lowbit rounds none, which is closer to the float model
            return "float"
        if type == "float":
            return "float8_row"
        return "int8_row" if given.get("symmetric", True) else "int8_row_asymmetric"


def _block(layer: LayerTensors, weights: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns that share a scale."""
    strategy, n, k = weights.get("strategy", "tensor"), layer.n, layer.k
    size, block = weights.get("group_size"), weights.get("block_structure")
    if strategy == "tensor":
        return n, k
    if strategy == "channel":
        return 1, k
    if strategy == "group" and isinstance(size, int) and (size > 0 or size == -1):
        return 1, k if size == -1 else min(size, k)
    if (
        strategy == "block"
        and isinstance(block, list)
        and len(block) == 2
        and all(isinstance(one, int) and one > 0 for one in block)
    ):
        return min(block[0], n), min(block[1], k)
    raise ValueError(
        f"{CONFIG}: strategy of {layer.name} must be tensor, channel, group with its group_size or block with its "
        f"block_structure, got {dict(weights)}"
    )


def _packed_codes(layer: LayerTensors, bits: int, asymmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Return codes as a stream, and zero points, of pack-quantized."""
    n, k = layer.n, layer.k
    if ".weight_shape" in layer:
        shape = layer.read(".weight_shape", (2,), torch.int64, torch.int32)
        if shape.tolist() != [n, k]:
            raise layer.error(".weight_shape", str([n, k]), str(shape.tolist()))
    each, dense, whole = 32 // bits, -(-k * bits // 32), -(-k // (32 // bits))
    if dense == whole and 32 % bits and k > each:
        raise ValueError(
            f"{layer.name}: k must be a multiple of 32 for {bits} bits, got k={k}, which has as many words with codes "
            "that cross words as without"
        )
    if layer.shape(".weight_packed")[-1:] == (dense,):
        words = layer.read(".weight_packed", (n, dense), torch.int32)
        stream = words.view(torch.uint8)[:, : -(-k * bits // 8)]
        rows = -(-n * bits // 32)
    else:
        words = layer.read(".weight_packed", (n, whole), torch.int32)
        stream = bit_stream(_unpacked(words, bits)[:, :k], bits)
        rows = -(-n // each)
    if not asymmetric:
        return stream, None
    groups = layer.shape(".weight_zero_point")[-1:]
    zeros = layer.read(".weight_zero_point", (rows, *groups), torch.int32).t().contiguous()
    zero = codes_of(zeros.view(torch.uint8), n, bits) if words.shape[1] == dense else _unpacked(zeros, bits)[:, :n]
    return stream, zero.t()


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes of words that hold whole codes, uint8 ``[rows, words * (32 // bits)]``."""
    shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32)
    return (words[:, :, None] >> shifts & 2**bits - 1).to(torch.uint8).flatten(1)


def _plain_codes(layer: LayerTensors, bits: int, asymmetric: bool) -> tuple[Tensor, Tensor | None]:
    """Return codes and zero points that are int8 in the file."""
    values, middle = layer.read(".weight", (layer.n, layer.k), torch.int8), 2 ** (bits - 1)
    if bits < 8 and ((values < -middle) | (values >= middle)).any():
        raise layer.error(
            ".weight", f"{-middle}..{middle - 1} for {bits} bits", f"{int(values.min())}..{int(values.max())}"
        )
    zero = None
    if asymmetric:
        zero = layer.read(".weight_zero_point", None, torch.int8, torch.int32, torch.int64)
        if zero.numel() not in (1, layer.n) and (zero.dim() != 2 or len(zero) != layer.n):
            raise layer.error(".weight_zero_point", f"one per scale of {layer.n} rows", text_of(zero))
        zero = zero.reshape(1 if zero.numel() == 1 else layer.n, -1).to(torch.int16) + middle
    codes = values.view(torch.uint8) ^ 128 if bits == 8 else (values + middle).to(torch.uint8)
    return codes, zero


def _permutation(layer: LayerTensors, width: int) -> Tensor | None:
    part = ".weight_g_idx"
    if part in layer and bool((layer.read(part, (layer.k,), torch.int32) == -1).all()):  # not set
        return None
    return inputs_by_group(layer, part, width)
