# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of optimum-quanto, whose quanto_qmap.json names the type of each layer: quant_method "quanto".

qint8, qfloat8        weight._data         int8 or float8_e4m3fn [n, k]
                      weight._scale        [n, 1]: w = scale * code
qint4, qint2          weight._data._data   uint8, the codes of the groups, [n * k / group, group], in 8 / bits parts
                                           of the first axis, the first part in the lowest bits
                      weight._scale        [n * k / group, 1]
                      weight._shift        the same, floats: w = scale * code - shift
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoints.methods.method import LayerCodes, LayerTensors, Method, float8_codes

MAP = "quanto_qmap.json"
"""The file that says what the layers are; config.json does not."""
_GROUPED = {"qint2": 2, "qint4": 4}
_TYPES = (*_GROUPED, "qint8", "qfloat8", "qfloat8_e4m3fn")
_BYTES, _FIELDS, _SCALE, _SHIFT = ".weight._data", ".weight._data._data", ".weight._scale", ".weight._shift"


class QuantoMethod(Method):
    """Reader of quanto's layers of integers and float8."""

    name = "quanto"
    parts = (_FIELDS, _BYTES, _SCALE, _SHIFT)
    marks = (_SCALE,)
    ignored = (".input_scale", ".output_scale")

    def __init__(self, settings: Mapping[str, Any], activations: str | None) -> None:
        super().__init__(settings, activations)
        self.map = settings.get("map")
        if not isinstance(self.map, Mapping):
            raise ValueError(f"{MAP} must be there for checkpoints of quanto, an object with the types of layers")
        for name, told in self.map.items():
            type = told.get("weights") if isinstance(told, Mapping) else None
            if type not in (*_TYPES, "none"):
                raise ValueError(f"{MAP}: weights of {name} must be one of {', '.join(_TYPES)}, got {type!r}")
            rounds = told.get("activations", "none")
            if rounds != "none" and activations is None:
                raise ValueError(
                    f"{MAP}: activations of {name} must be 'none', got {rounds!r}, a fixed scale; "
                    "LowbitConfig('checkpoint', activations='float') is without it"
                )

    def read(self, layer: LayerTensors) -> LayerCodes:
        type = self.map.get(layer.name.removesuffix(".weight"), {}).get("weights")
        if type in _GROUPED:
            return self._grouped(layer, _GROUPED[type])
        scale = layer.scales(_SCALE, (layer.n, 1))
        if type == "qint8":
            codes = layer.read(_BYTES, (layer.n, layer.k), torch.int8).view(torch.uint8) ^ 128
            return self.codes(codes, scale, None, "int8", layer.k, layer)
        if type in _TYPES:
            return self.codes(float8_codes(layer, _BYTES), scale, None, "fp8_e4m3", layer.k, layer)
        raise ValueError(f"{MAP}: {layer.name} must have a type, as it has codes in the files, and has none")

    def _grouped(self, layer: LayerTensors, bits: int) -> LayerCodes:
        n, k, parts = layer.n, layer.k, 8 // bits
        group = layer.shape(_FIELDS)[-1]
        if not group or k % group:
            raise layer.error(_FIELDS, f"groups that divide k={k}", str(group))
        rows = n * k // group
        packed = layer.read(_FIELDS, (-(-rows // parts), group), torch.uint8)
        codes = torch.cat([packed >> bits * part & 2**bits - 1 for part in range(parts)])[:rows].reshape(n, k)
        scale, shift = (layer.scales(part, (rows, 1)).view(n, -1) for part in (_SCALE, _SHIFT))
        return self.codes(codes, scale, self._zero(layer, scale, shift), f"int{bits}", group, layer)

    def _zero(self, layer: LayerTensors, scale: Tensor, shift: Tensor) -> Tensor:
        """Return zero points: what the file subtracts from products, as what is subtracted from codes."""
        zero = shift.double() / scale.double()
        empty = scale == 0
        if (shift[empty] != 0).any():
            raise layer.error(_SHIFT, f"0 where {_SCALE.removeprefix('.')} is 0", "another number")
        return torch.where(empty, 0, zero).float()
