# SPDX-License-Identifier: Apache-2.0
"""Int8WeightOnlyQuantizedTrainingConfig: training of linear layers with int8 weights, without a float copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowbit import devices
from lowbit.formats.int8 import Int8WeightOnlyConfig
from lowbit.formats.spec import LinearSpec
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.codes import CodedWeight
from lowbit.quant.kinds import weights_of
from lowbit.quant.load_check import guard
from lowbit.quant.packing import Packed, Selected, by_weight, check_finite, pack_group
from lowbit.quant.report import Distortion, QuantizationReport, ReportRow, model_bytes
from lowbit.quant.select import select
from lowbit.training.int8_weight import Int8Weight
from lowbit.training.int8_weight_linear import Int8WeightLinear
from lowbit.training.preparing import TwoStepConfig, check_no_head, in_order, notes_of_float_experts, weight_of

_SPEC = LinearSpec("int8")
_ZERO = 128  # zero point of the packed codes, which are unsigned


@dataclass(frozen=True, slots=True)
class Int8WeightOnlyQuantizedTrainingConfig(TwoStepConfig):
    """Configuration for training int8 weights without a float copy.

    Call ``quantize_`` with it before you create the optimizer. The weight consists of int8 codes and one scale per row.
    Forward and backward multiply by the decoded float values, and the gradient is float. The values that an optimizer
    writes are rounded stochastically, with torch's generator, so even updates smaller than the distance of two codes
    have an effect on average. ``step="convert"`` ends the training, and turns the layers into `QuantLinear` with the
    same codes.

    Args:
        step: "prepare" or "convert".

    Raises:
        ValueError: step is neither.

    Example:
        >>> lowbit.quantize_(model, lowbit.training.Int8WeightOnlyQuantizedTrainingConfig())
        >>> optimizer = lowbit.optim.AdamW8bit(model.parameters())
        >>> train(model, optimizer)
        >>> lowbit.quantize_(model, lowbit.training.Int8WeightOnlyQuantizedTrainingConfig(step="convert"))
    """

    def change_layers(self, model: nn.Module, filter_fn: Any, *, strict: bool, head: Any) -> QuantizationReport:
        check_no_head(self, head)
        report = QuantizationReport(str(self), model_bytes_before=model_bytes(model))
        with changing_layers(model):
            converts = self.step == "convert"
            report.rows = _convert(model, filter_fn) if converts else _prepare(model, filter_fn, strict)
        report.notes += [] if report.rows else ["no layer was selected"]
        report.notes += notes_of_float_experts(model, "training of int8 weights") if self.step == "prepare" else []
        report.notes += guard(model)
        report.model_bytes_after = model_bytes(model)
        return report


def _prepare(model: nn.Module, filter_fn: Any, strict: bool) -> list[ReportRow]:
    selected, skipped = select(model, Int8WeightOnlyConfig(), filter_fn, None, strict, packs=False)
    for item in selected:
        _check(item)
    weights: dict[int, nn.Parameter] = {}  # new weights by the ids of float weights, which may be shared
    rows = {}
    for item in selected:
        module, weight = item.module, item.value
        first = id(weight) not in weights
        if first:
            codes = Int8Weight.from_float(weight)
            weights[id(weight)] = nn.Parameter(codes, requires_grad=weight.requires_grad)
        before, after = (weight.nbytes, weights[id(weight)].nbytes) if first else (0, 0)
        module.float_class, module.__class__ = type(module), Int8WeightLinear
        module.weight = weights[id(weight)]
        note = "int8 weight, to be trained"
        rows[item.name] = ReportRow(item.name, "int8 per-channel", item.weight.shape, before, after, note=note)
    return in_order(model, rows, skipped)


def _check(item: Selected) -> None:
    label = weight_of(item)
    devices.check("Int8WeightOnlyQuantizedTrainingConfig", label, item.module.weight.device)
    if item.note:
        raise ValueError(f"quantize_: {label} must not be shared with a layer that stays float, got one {item.note}")
    if item.weight.transposed:
        raise TypeError(f"quantize_: {label} must be of an nn.Linear, got a Conv1D: its scales are of columns")


@torch.no_grad()
def _convert(model: nn.Module, filter_fn: Any) -> list[ReportRow]:
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Int8WeightLinear) and (filter_fn is None or filter_fn(module, name))
    ]
    selected = []
    for name, module in layers:
        check_finite("quantize_", f"weight of {name or 'the model itself'}", module.weight.scale)
        (weight,) = weights_of(module)
        selected.append(Selected.of(name, module, weight, _SPEC, module.weight, "codes as they were trained"))
    rows = {row.layer: row for group in by_weight(selected) for row in _convert_group(group)}
    return [rows[name] for name, _ in layers]


def _convert_group(group: list[Selected]) -> list[ReportRow]:
    """Pack the codes of the weight that these layers share, and assign the result to all of them."""
    weight: Int8Weight = group[0].value

    def make(layout: str) -> Packed:
        codes = (weight.codes.int() + _ZERO).to(torch.uint8)
        packed = CodedWeight.of(codes, weight.scale.unsqueeze(1), None, _SPEC).pack(layout)
        return nn.Parameter(packed, requires_grad=False), Distortion()

    def restore(module: Int8WeightLinear) -> None:
        module.__class__ = module.__dict__.pop("float_class")

    return pack_group(group, make, weight.nbytes, restore=restore)[1]
