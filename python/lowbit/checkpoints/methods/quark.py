# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of AMD's Quark: quant_method "quark", whose ``dtype`` and ``qscheme`` say what weights are.

dtype       weight                   int4 and uint4: int32, 8 fields to a word; ``pack_method`` "reorder" has them in
                                     AWQ's order; int4 in two's complement; fp4: uint8, 2 fields to a byte
qscheme     weight      scale        zero points (of integers, in the dtype of the weight, packed like it)
per_tensor  [n, k]      one number   one number
per_channel [n, k]      [n]          [n]
per_group   [k, n]      [groups, n]  [groups, n]; fp8 and fp4: [n, k] and [n, groups]
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoints.methods.awq import columns_in_order
from lowbit.checkpoints.methods.fp4 import mxfp4_codes
from lowbit.checkpoints.methods.method import (
    CONFIG,
    LayerCodes,
    LayerTensors,
    Method,
    float8_codes,
    scale_of_blocks,
)
from lowbit.quant.codes import codes_of

_INTEGERS = {"int4": (4, True), "uint4": (4, False), "int8": (8, True), "uint8": (8, False)}
"""Bits, and whether there is a sign."""
_TYPES = (*_INTEGERS, "fp8_e4m3", "fp4")
_SCHEMES = ("per_tensor", "per_channel", "per_group")
_WEIGHT, _SCALE, _ZERO = ".weight", ".weight_scale", ".weight_zero_point"
_BLOCK = 32  # codes of fp4 that share a scale


class QuarkMethod(Method):
    """Reader of Quark's layers of 4 and 8 bits."""

    name = "quark"
    parts = (_WEIGHT, _SCALE, _ZERO, ".input_scale", ".input_zero_point")
    marks = (_SCALE,)
    ignored = (".output_scale", ".output_zero_point", ".k_scale", ".v_scale")

    def __init__(self, settings: Mapping[str, Any], activations: str | None) -> None:
        super().__init__(settings, activations)
        export = settings.get("export")
        form = export.get("weight_format") if isinstance(export, Mapping) else None
        self.pack_method = export.get("pack_method") if isinstance(export, Mapping) else None
        if form != "real_quantized" or self.pack_method not in ("reorder", "order"):
            raise ValueError(
                f"{CONFIG}: export of quark must have weight_format 'real_quantized' and pack_method 'reorder' or "
                f"'order', got {export!r}"
            )
        if settings.get("layer_type_quant_config"):
            raise ValueError(f"{CONFIG}: layer_type_quant_config of quark must be empty, got formats by classes")
        self.by_layer: Mapping[str, Any] = settings.get("layer_quant_config") or {}
        for name, config in {"global_quant_config": settings.get("global_quant_config"), **self.by_layer}.items():
            self._check(name, config)

    def _check(self, name: str, config: Any) -> None:
        weight = config.get("weight") if isinstance(config, Mapping) else None
        if config is not None and weight is None:
            return  # its layers stay float
        fits = isinstance(weight, Mapping) and weight.get("dtype") in _TYPES and weight.get("qscheme") in _SCHEMES
        if fits and weight["dtype"] == "fp4":
            block = weight["qscheme"], weight.get("group_size"), weight.get("scale_format")
            fits = block == ("per_group", _BLOCK, "e8m0")
        if not fits or (weight["qscheme"] == "per_group" and not isinstance(weight.get("group_size"), int)):
            raise ValueError(
                f"{CONFIG}: the weight of {name} of quark must have a dtype of {', '.join(_TYPES)} (with scales of "
                f"e8m0 for {_BLOCK}) and a qscheme of {', '.join(_SCHEMES)}, got {weight!r}"
            )

    def read(self, layer: LayerTensors) -> LayerCodes:
        config = self._config(layer)
        told = config["weight"]
        type, scheme, n, k = told["dtype"], told["qscheme"], layer.n, layer.k
        meant = self._activations(layer, config.get("input_tensors"), type)
        if type == "fp4":
            return mxfp4_codes(self, layer, _WEIGHT, _SCALE)
        group = told["group_size"] if scheme == "per_group" else k
        group = min(group, k) if group > 0 else k
        if type == "fp8_e4m3":
            scale = self._of_rows(layer, _SCALE) if scheme != "per_group" else scale_of_blocks(layer, _SCALE, 1, group)
            return self.codes(float8_codes(layer, _WEIGHT), scale, None, type, group, layer, meant=meant)
        bits, signed = _INTEGERS[type]
        if scheme == "per_group":
            groups = -(-k // group)
            codes = self._fields(layer, _WEIGHT, (k, n), type).t()
            scale = layer.scales(_SCALE, (groups, n)).t().contiguous()
            zero = self._fields(layer, _ZERO, (groups, n), type).t() if _ZERO in layer else None
        else:
            codes, scale = self._fields(layer, _WEIGHT, (n, k), type), self._of_rows(layer, _SCALE)
            zero = self._zero_of_rows(layer, type, scheme) if _ZERO in layer else None
        if zero is None:
            zero = torch.zeros(1, 1, dtype=torch.uint8) + (2 ** (bits - 1) if signed else 0)
        zero = zero.expand_as(scale).contiguous()
        return self.codes(codes.contiguous(), scale, zero, f"int{bits}", group, layer, meant=meant)

    def _fields(self, layer: LayerTensors, part: str, shape: tuple[int, ...], type: str) -> Tensor:
        """Return codes or zero points of this shape, uint8, so that 0 is the smallest."""
        bits, signed = _INTEGERS[type]
        if bits == 8:
            values = layer.read(part, shape, torch.int8 if signed else torch.uint8).view(torch.uint8)
            return values ^ 128 if signed else values
        words = layer.read(part, (*shape[:-1], -(-shape[-1] // 8)), torch.int32).reshape(-1, -(-shape[-1] // 8))
        ordered = self.pack_method == "order"
        codes = codes_of(words.view(torch.uint8), words.shape[1] * 8, 4) if ordered else columns_in_order(words)
        codes = codes[:, : shape[-1]].reshape(shape)
        return codes ^ 8 if signed else codes

    def _zero_of_rows(self, layer: LayerTensors, type: str, scheme: str) -> Tensor:
        """Return the zero points of rows, ``[n, 1]``, or the one of all."""
        if scheme == "per_channel":
            return self._fields(layer, _ZERO, (layer.n,), type).view(-1, 1)
        bits, signed = _INTEGERS[type]
        value = layer.read(_ZERO, (), torch.int32, torch.int8, torch.uint8).to(torch.int16)
        return value.reshape(1, 1) + (2 ** (bits - 1) if signed else 0)

    def _of_rows(self, layer: LayerTensors, part: str) -> Tensor:
        """Return scales of rows, ``[n, 1]``, from those or from one for all."""
        scale = layer.scales(part)
        if scale.numel() != 1 and tuple(scale.shape) != (layer.n,):
            raise layer.error(part, f"one number or [{layer.n}]", str(list(scale.shape)))
        return scale.reshape(-1, 1).expand(layer.n, 1).contiguous()

    def _config(self, layer: LayerTensors) -> Mapping[str, Any]:
        """Return the settings of a layer: of its name, of the first pattern that it fits, or of all layers."""
        name = layer.name.removesuffix(_WEIGHT)
        fitting = [config for pattern, config in self.by_layer.items() if fnmatch(name, pattern)]
        config = self.by_layer.get(name, fitting[0] if fitting else self.settings["global_quant_config"])
        if config.get("weight") is None:
            raise ValueError(
                f"{CONFIG}: {name} must have a weight in the settings of quark, as it has codes in the files"
            )
        return config

    def _activations(self, layer: LayerTensors, given: Any, type: str) -> str:
        """Return how activations are rounded. Groups of them are not, which is closer to the float model."""
        if not given or self.activations is not None:
            return "float"
        if not isinstance(given, Mapping) or given.get("is_dynamic") is not True:
            other = "float" if type.startswith("fp") else "int8"
            raise ValueError(
                f"{CONFIG}: input_tensors of {layer.name} must be dynamic, got a fixed scale; "
                f"LowbitConfig('checkpoint', activations={other!r}) is without it"
            )
        kind = given.get("dtype"), given.get("qscheme")
        if given.get("qscheme") == "per_group":
            return "float"
        if kind[0] != type or type not in ("int8", "fp8_e4m3"):
            raise ValueError(
                f"{CONFIG}: input_tensors of {layer.name} must have the dtype of its weight, int8 or fp8_e4m3, got "
                f"{kind[0]!r}; LowbitConfig('checkpoint', activations='float') leaves them"
            )
        if type == "fp8_e4m3":
            return "float8_row"
        return "int8_row" if given.get("symmetric", True) else "int8_row_asymmetric"
