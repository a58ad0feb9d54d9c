# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of HQQ: quant_method "hqq", groups along k (axis 1).

W_q    codes of the groups, [n * k / group, group], packed along the first axis: uint8, of 8 / bits parts the first
       in the highest bits (8, 4 and 2 bits); int32 of 10 parts for 3 bits, the first in bits 27 to 29
scale  [n * k / group, 1], zero the same, real numbers: w = scale * (code - zero)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoints.methods.method import CONFIG, LayerCodes, LayerTensors, Method

_PARTS = {8: 1, 4: 2, 3: 10, 2: 4}
_WHAT_IS_KNOWN = (
    "nbits", "group_size", "axis", "shape", "packing", "view_as_float", "unpack_view_dtype", "compute_dtype",
    "quant_scale", "quant_zero", "optimize", "round_zero", "channel_wise", "offload_meta", "encoded_state_dict",
    "stores_quant_config",
)  # fmt: skip
"""Tensors beside the codes that repeat the settings."""


class HQQMethod(Method):
    """Reader of HQQ's layers of 2, 3, 4 and 8 bits in groups along k."""

    name = "hqq"
    parts = (".W_q", ".scale", ".zero", *(f".{name}" for name in _WHAT_IS_KNOWN))
    marks = (".W_q",)

    def __init__(self, settings: Mapping[str, Any], activations: str | None) -> None:
        super().__init__(settings, activations)
        told = settings.get("quant_config")
        if not isinstance(told, Mapping):
            raise ValueError(f"{CONFIG}: quant_config of hqq must be an object, got {told!r}")
        self.by_layer = {} if "weight_quant_params" in told else dict(told)
        for params in self.by_layer.values() or (told,):
            self._check(params)

    def _check(self, told: Any) -> None:
        params = told.get("weight_quant_params") if isinstance(told, Mapping) else None
        wanted = {"axis": (1,), "nbits": tuple(_PARTS), "view_as_float": (False, None)}
        for name, choices in wanted.items():
            got = params.get(name) if isinstance(params, Mapping) else None
            if got not in choices:
                text = ", ".join(map(str, choices))
                raise ValueError(f"{CONFIG}: {name} of hqq must be one of {text}, got {got!r}")
        for name in ("scale_quant_params", "zero_quant_params"):
            if told.get(name) is not None:
                raise ValueError(f"{CONFIG}: {name} of hqq must be null, got {told[name]!r}")

    def read(self, layer: LayerTensors) -> LayerCodes:
        params = self._params(layer)["weight_quant_params"]
        bits, n, k = params["nbits"], layer.n, layer.k
        group = params.get("group_size") or k
        if not isinstance(group, int) or k % group:
            raise ValueError(f"{layer.name}: group_size of hqq must divide k={k}, got {group!r}")
        rows, parts = n * k // group, _PARTS[bits]
        dtype = torch.int32 if bits == 3 else torch.uint8
        packed = layer.read(".W_q", (-(-rows // parts), group), dtype)
        if rows % parts and bits != 3:
            raise layer.error(".W_q", f"{parts} equal parts of {rows} groups", str(list(packed.shape)))
        shifts = range(bits * (parts - 1), -1, -bits)
        codes = torch.cat([(packed >> shift & 2**bits - 1).to(torch.uint8) for shift in shifts])[:rows]
        scale, zero = (self._of_groups(layer, part, n, k // group) for part in (".scale", ".zero"))
        return self.codes(codes.reshape(n, k), scale, zero, f"int{bits}", group, layer)

    def _of_groups(self, layer: LayerTensors, part: str, n: int, groups: int) -> Tensor:
        return layer.scales(part, (n * groups, 1)).view(n, groups)

    def _params(self, layer: LayerTensors) -> Mapping[str, Any]:
        """Return the settings of a layer, which may be given by the end of its name."""
        if not self.by_layer:
            return self.settings["quant_config"]
        name = layer.name.removesuffix(".weight")
        found = [params for tag, params in self.by_layer.items() if name.endswith(f".{tag}") or name == tag]
        if not found:
            raise ValueError(
                f"{CONFIG}: quant_config of hqq must have settings for {name}, got {', '.join(self.by_layer)}"
            )
        return found[0]
