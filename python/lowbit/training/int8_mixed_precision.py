# SPDX-License-Identifier: Apache-2.0
"""Int8MixedPrecisionTrainingConfig: training of float weights with int8 products in linear layers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from lowbit.formats.int8 import Int8DynamicActivationInt8WeightConfig
from lowbit.quant.kinds import is_trained, kind_of
from lowbit.quant.load_check import guard
from lowbit.quant.quant_experts import EXPERTS
from lowbit.quant.quant_linear import LINEAR
from lowbit.quant.report import QuantizationReport, ReportRow, model_bytes
from lowbit.quant.select import select
from lowbit.training.experts import Int8MixedPrecisionExperts
from lowbit.training.experts import prepare_in_place as prepare_experts
from lowbit.training.experts import restore_in_place as restore_experts
from lowbit.training.int8_linear import Int8MixedPrecisionLinear, prepare_in_place, restore_in_place
from lowbit.training.preparing import check_devices, check_no_head, in_order


@dataclass(frozen=True, slots=True)
class Int8MixedPrecisionTrainingConfig:
    """Configuration for training float weights with int8 products.

    Weights stay float parameters with their names and state dict, so optimizers and checkpoints of the float model
    remain valid. Each int8 product rounds both operands to int8, with a scale per row, and sums the products of codes
    exactly. Gradients are those of a float layer. If all arguments are False, ``quantize_`` turns such layers back into
    float layers.

    Args:
        output: whether the forward, x @ weight.T, is in int8.
        grad_input: whether the gradient of x, grad_y @ weight, is in int8.
        grad_weight: whether the gradient of the weight, grad_y.T @ x, is in int8.

    Raises:
        TypeError: an argument is not a bool.

    Example:
        >>> lowbit.quantize_(model, lowbit.training.Int8MixedPrecisionTrainingConfig(grad_weight=False))
        >>> train(model)
        >>> lowbit.quantize_(model, lowbit.training.Int8MixedPrecisionTrainingConfig(False, False, False))
    """

    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise TypeError(f"{type(self).__name__}: {field.name} must be True or False, got {value!r}")

    def change_layers(self, model: nn.Module, filter_fn: Any, *, strict: bool, head: Any) -> QuantizationReport:
        check_no_head(self, head)
        report = QuantizationReport(str(self), model_bytes_before=model_bytes(model))
        if self.output or self.grad_input or self.grad_weight:
            report.rows = self._prepare(model, filter_fn, strict)
            report.notes += guard(model)
        else:
            report.rows = _restore(model, filter_fn)
        report.notes += [] if report.rows else ["no layer was selected"]
        report.model_bytes_after = model_bytes(model)
        return report

    def _prepare(self, model: nn.Module, filter_fn: Any, strict: bool) -> list[ReportRow]:
        config, kinds = Int8DynamicActivationInt8WeightConfig(), (LINEAR, EXPERTS)
        selected, skipped = select(model, config, filter_fn, None, strict, kinds=kinds, packs=False)
        check_devices(type(self).__name__, selected)
        rows, int8_products = {}, (self.output, self.grad_input, self.grad_weight)
        for item in selected:
            if kind_of(item.module) is LINEAR:
                prepare_in_place(item.module, int8_products)
            elif not is_trained(item.module):  # the first of its two weights
                prepare_experts(item.module, Int8MixedPrecisionExperts, int8_products=int8_products)
            size, name = item.value.nbytes, item.row_name
            note = "float weight, multiplied in int8"
            rows[name] = ReportRow(name, "int8 products", item.weight.shape, size, size, note=note)
        return in_order(model, rows, skipped)

    def __str__(self) -> str:
        told = ", ".join(f"{field.name}=False" for field in fields(self) if not getattr(self, field.name))
        return f"{type(self).__name__}({told})"


def _restore(model: nn.Module, filter_fn: Any) -> list[ReportRow]:
    rows = []
    for name, module in model.named_modules():
        ours = isinstance(module, (Int8MixedPrecisionLinear, Int8MixedPrecisionExperts))
        if ours and (filter_fn is None or filter_fn(module, name)):
            (restore_in_place if isinstance(module, Int8MixedPrecisionLinear) else restore_experts)(module)
            rows.append(ReportRow.skipped(name, module, "float again"))
    return rows
