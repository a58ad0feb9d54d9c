# SPDX-License-Identifier: Apache-2.0
"""The end of quantization-aware training: prepared layers become quantized layers, or float layers again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.codes import CodedWeight
from lowbit.quant.kinds import kind_of, weights_of
from lowbit.quant.load_check import guard
from lowbit.quant.packing import Packed, Selected, by_weight, check_finite, pack_group, pack_weight
from lowbit.quant.quant_experts import EXPERTS
from lowbit.quant.report import Distortion, QuantizationReport, ReportRow, model_bytes
from lowbit.training.experts import FakeQuantizedExperts
from lowbit.training.experts import restore_in_place as restore_experts
from lowbit.training.layers import SCALE, FakeQuantized, restore_in_place


def convert(model: nn.Module, title: str, base_config: str | None, filter_fn: Any) -> QuantizationReport:
    """Quantize the layers that were prepared with ``base_config``, or turn all prepared layers into float layers.

    Args:
        model: the model, which is changed in place.
        title: the configuration as text, for the report.
        base_config: the configuration as text; None turns layers back into float layers.
        filter_fn: called with (module, qualified name); True selects a prepared layer. None selects all.

    Raises:
        ValueError: no layer was prepared with this configuration, or a weight or scale is not finite (the message names
            it).
    """
    prepared = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (FakeQuantized, FakeQuantizedExperts))
    ]
    taken = [
        (name, module)
        for name, module in prepared
        if base_config in (None, module.base_config) and (filter_fn is None or filter_fn(module, name))
    ]
    if not taken:
        there = ", ".join(sorted({module.base_config for _, module in prepared})) or "none"
        wanted = base_config or "training"
        raise ValueError(f"quantize_: {title} needs layers prepared for {wanted}, got layers prepared for {there}")
    for name, module in taken:
        for key in (*(weight.key for weight in weights_of(module)), SCALE):
            tensor = module._parameters.get(key)
            if tensor is not None:
                check_finite("quantize_", f"{key} of {name or 'the model itself'}", tensor)
    report = QuantizationReport(title, model_bytes_before=model_bytes(model))
    if base_config is None:
        for name, module in taken:
            _restore(module)
            report.rows.append(ReportRow.skipped(name, module, "float again"))
    else:
        selected = [
            Selected.of(name, module, weight, module.spec, module._parameters[weight.key])
            for name, module in taken
            for weight in weights_of(module)
        ]
        with changing_layers(model):
            names = [item.row_name for item in selected]
            rows = {row.layer: row for group in by_weight(selected) for row in _convert_group(group)}
        report.rows = [rows[name] for name in names]
        guard(model)
    left = len(prepared) - len(taken)
    if left:
        report.notes.append(f"{left} layers are still being trained")
    report.model_bytes_after = model_bytes(model)
    return report


@torch.no_grad()
def _convert_group(group: list[Selected]) -> list[ReportRow]:
    """Pack the current codes of the weight that these layers share, and assign the result to all of them."""
    first, spec = group[0], group[0].module.spec
    experts = kind_of(first.module) is EXPERTS

    def make(layout: str) -> Packed:
        if experts:
            return pack_weight(first.weight.matrix(first.value), spec, None, layout)
        packed = CodedWeight.of(*first.module.quantize(), spec).pack(layout)
        return nn.Parameter(packed, requires_grad=False), _distortion(first.module)

    return pack_group(group, make, first.value.nbytes, restore=_restore)[1]


def _restore(module: nn.Module) -> None:
    """Turn a layer back into its float class; experts of which one weight is packed already are not in training."""
    if isinstance(module, FakeQuantized):
        restore_in_place(module)
    elif isinstance(module, FakeQuantizedExperts):
        restore_experts(module)


def _distortion(layer: FakeQuantized) -> Distortion:
    weight = layer.matrix()
    if weight.is_meta:
        return Distortion()
    error = weight.float() - layer.fake_quantized_weight().float()
    signal, noise = (float(values.square().sum(dtype=torch.float64)) for values in (weight, error))
    return Distortion(signal, noise, noise)
