# SPDX-License-Identifier: Apache-2.0
"""BitNetTrainingConfig: ternary weights with int8 activations (BitNet b1.58, Ma et al., arXiv 2402.17764).

    y = fake_quantize(x) @ (scale * codes).T + bias
    scale = mean |weight|,   codes = round(weight / scale), from -1 to 1

Gradients are straight-through: those of the rounded weight and the rounded x are used for the float values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.formats.intx import int8_dynamic_activation_intx_weight
from lowbit.ops.autocast import in_autocast_dtype
from lowbit.ops.fake_quantize import fake_quantize_activations
from lowbit.quant.kinds import features_of
from lowbit.quant.load_check import guard
from lowbit.quant.report import QuantizationReport, ReportRow, model_bytes
from lowbit.quant.select import select
from lowbit.training.convert import convert
from lowbit.training.layers import FakeQuantizedLinear, prepare_in_place
from lowbit.training.preparing import TwoStepConfig, check_devices, check_no_head, in_order, notes_of_float_experts

_INT2 = int8_dynamic_activation_intx_weight(torch.int2, None)
_ZERO = 2  # the code of int2 that is 0


@dataclass(frozen=True, slots=True)
class BitNetTrainingConfig(TwoStepConfig):
    """Configuration for training ternary weights with int8 activations (BitNet b1.58, Ma et al., arXiv 2402.17764).

    ``quantize_`` with ``step="prepare"`` prepares float layers for training. Their forward rounds each weight to -1, 0
    or 1 times the mean magnitude of the whole weight, and activations to int8 with one scale per row. ``quantize_``
    with ``step="convert"`` turns them into `QuantLinear` of 2 bits with int8 activations; ``dequantize()`` returns, bit
    for bit, the weight of the last forward.

    Args:
        step: "prepare" or "convert".

    Raises:
        ValueError: step is neither.

    Example:
        >>> lowbit.quantize_(model, lowbit.training.BitNetTrainingConfig())
        >>> train(model)
        >>> lowbit.quantize_(model, lowbit.training.BitNetTrainingConfig(step="convert"))
    """

    def change_layers(self, model: nn.Module, filter_fn: Any, *, strict: bool, head: Any) -> QuantizationReport:
        check_no_head(self, head)
        if self.step == "convert":
            return convert(model, str(self), BitNetLinear.base_config, filter_fn)
        selected, skipped = select(model, _INT2, filter_fn, None, strict, packs=False)
        check_devices(type(self).__name__, selected)
        report = QuantizationReport(str(self), model_bytes_before=model_bytes(model))
        rows = {}
        for item in selected:
            module, size, shape = item.module, item.module.weight.nbytes, features_of(item.module)
            prepare_in_place(module, item.spec, BitNetLinear.base_config)
            module.__class__ = BitNetLinear
            rows[item.name] = ReportRow(item.name, "ternary", shape, size, size, note="ternary weight, to be trained")
        report.rows = in_order(model, rows, skipped)
        report.notes += [] if selected else ["no layer was selected"]
        report.notes += notes_of_float_experts(model, "ternary training")
        report.notes += guard(model)
        report.model_bytes_after = model_bytes(model)
        return report


class BitNetLinear(FakeQuantizedLinear):
    """An nn.Linear with a ternary weight and int8 activations."""

    base_config = "BitNetTrainingConfig()"
    end = 'BitNetTrainingConfig(step="convert")'

    def forward(self, x: Tensor) -> Tensor:
        x = fake_quantize_activations(in_autocast_dtype(x), self.x_format, 0)
        return functional.linear(x, self.fake_quantized_weight(), self.bias)

    def fake_quantized_weight(self) -> Tensor:
        return _Ternary.apply(self.matrix())

    def quantize(self) -> tuple[Tensor, Tensor, None]:
        codes, scale = _ternary(self.matrix().detach())
        return (codes + _ZERO).to(torch.uint8), scale.expand(len(codes), 1), None


class _Ternary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        codes, scale = _ternary(weight)
        return (codes * scale).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _ternary(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes as floats ``[n, k]``, and the scale. If a weight is not finite, they are nan."""
    weight = weight.float()
    scale = weight.abs().mean()
    return (weight / torch.where(scale == 0, 1, scale)).round().clamp(-1, 1), scale
