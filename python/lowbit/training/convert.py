# SPDX-License-Identifier: Apache-2.0
"""The end of quantization-aware training: prepared layers become quantized ones, or float ones again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowbit import _C
from lowbit.quant.adapters import adopt_lora_layers
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.codes import CodedWeight
from lowbit.quant.distortion import Distortion
from lowbit.quant.linear_layers import features_of, is_embedding
from lowbit.quant.load_check import check_state_dicts_of
from lowbit.quant.packing import all_finite
from lowbit.quant.quant_embedding import ROW_MAJOR, quantize_embedding_in_place
from lowbit.quant.quant_linear import quantize_in_place
from lowbit.quant.report import QuantizationReport, ReportRow, model_bytes
from lowbit.quant.select import serving_kernel
from lowbit.training.layers import SCALE, FakeQuantized, restore_in_place

Layers = list[tuple[str, FakeQuantized]]


def convert(model: nn.Module, title: str, base_config: str | None, filter_fn: Any) -> QuantizationReport:
    """Quantize the layers that ``base_config`` prepared, or with None make all prepared ones float.

    Raises:
        ValueError: no layer was prepared so, or a weight or scale is not finite; names it.
    """
    prepared = [(name, module) for name, module in model.named_modules() if isinstance(module, FakeQuantized)]
    taken = [
        (name, module)
        for name, module in prepared
        if base_config in (None, module.base_config) and (filter_fn is None or filter_fn(module, name))
    ]
    if not taken:
        there = ", ".join(sorted({module.base_config for _, module in prepared})) or "none"
        wanted = base_config or "training"
        raise ValueError(f"quantize_: {title} must meet layers prepared for {wanted}, got layers of {there}")
    for name, module in taken:
        for key in ("weight", SCALE):
            tensor = module._parameters[key]
            if tensor is not None and not tensor.is_meta and not all_finite(tensor):
                raise ValueError(f"quantize_: {key} of {name or 'the model itself'} must be finite, got inf or nan")
    report = QuantizationReport(title, model_bytes_before=model_bytes(model))
    if base_config is None:
        for name, module in taken:
            restore_in_place(module)
            report.rows.append(ReportRow.skipped(name, module, "float again"))
    else:
        with changing_layers(model):
            rows = {row.layer: row for group in _by_weight(taken) for row in _convert_group(group)}
        report.rows = [rows[name] for name, _ in taken]
        check_state_dicts_of(model)
        adopt_lora_layers(model)
    left = len(prepared) - len(taken)
    if left:
        report.notes.append(f"{left} layers are still being trained")
    report.model_bytes_after = model_bytes(model)
    return report


def _by_weight(layers: Layers) -> list[Layers]:
    """Group layers that share one Parameter."""
    groups: dict[int, Layers] = defaultdict(list)
    for name, module in layers:
        groups[id(module.weight)].append((name, module))
    return list(groups.values())


@torch.no_grad()
def _convert_group(group: Layers) -> Iterator[ReportRow]:
    """Pack the one weight of these layers and hand it to all of them."""
    first_name, first = group[0]
    layout = ROW_MAJOR if all(is_embedding(module) for _, module in group) else _C.LAYOUT
    codes, scale, zero = first.quantize()
    packed = nn.Parameter(CodedWeight.of(codes, scale, zero, first.spec).pack(layout), requires_grad=False)
    before, distortion, row = first.weight.nbytes, _distortion(first), None
    for name, module in group:
        spec, shape = module.spec, features_of(module)
        kernel = serving_kernel(spec, *shape, module.weight, embedding=is_embedding(module))
        restore_in_place(module)
        if is_embedding(module):
            quantize_embedding_in_place(module, packed, spec, layout)
        else:
            quantize_in_place(module, packed, spec)
        if row is None:
            row = replace(ReportRow.packed(name, spec, shape, before, distortion, kernel), bytes_after=packed.nbytes)
            yield row
        else:
            yield row.shared(name, spec, kernel)


def _distortion(layer: FakeQuantized) -> Distortion:
    weight = layer.matrix()
    if weight.is_meta:
        return Distortion()
    error = weight.float() - layer.fake_quantized_weight().float()
    signal, noise = (float(values.square().sum(dtype=torch.float64)) for values in (weight, error))
    return Distortion(signal, noise, noise)
