# SPDX-License-Identifier: Apache-2.0
"""QATConfig: quantization-aware training with quantize_, in two steps.

After "prepare", layers compute with the values that quantization would give them, and are trained. "convert" packs the
codes of the final weights. Both use the op `fake_quantize`, so the conversion does not change the values.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats.base import FormatConfig
from lowbit.formats.semi_sparse import FORMAT as SEMI_SPARSE
from lowbit.formats.spec import LinearSpec
from lowbit.quant.kinds import is_trained, kind_of
from lowbit.quant.load_check import guard
from lowbit.quant.output_head import head_config
from lowbit.quant.packing import Selected, pack_weight
from lowbit.quant.quant_embedding import EMBEDDING
from lowbit.quant.quant_experts import EXPERTS
from lowbit.quant.quant_linear import LINEAR, QuantLinear
from lowbit.quant.quantize import config_asked_for
from lowbit.quant.report import QuantizationReport, ReportRow, model_bytes
from lowbit.quant.select import select
from lowbit.training.convert import convert
from lowbit.training.experts import prepare_fake_quantized
from lowbit.training.layers import prepare_in_place
from lowbit.training.preparing import check_devices, check_step, in_order, notes_of_float_experts


@dataclass(frozen=True, slots=True)
class QATConfig:
    """Configuration for quantization-aware training.

    ``quantize_`` with ``step="prepare"`` prepares float layers for training: they compute in float with the weights and
    activations that the quantized layers will have. The gradient passes through the rounding, except for weights whose
    code was clipped. ``quantize_`` with ``step="convert"`` turns them into `QuantLinear` and `QuantEmbedding`:
    ``dequantize()`` returns, bit for bit, the weight of the last forward, and kernels round activations to the same
    codes. Unless scales are learned, they are computed from the range of each group in every step.

    Args:
        base_config: a configuration of lowbit or torchao, or its text. Float and 2:4 sparse formats and ``algorithm``
            are not supported, and ``scale="search"`` only with learned scales. None, only with "convert", turns layers
            back into float layers.
        step: "prepare" or "convert".
        learned_scales: whether scales are parameters, ``weight_scale``, that start as ``base_config`` chooses them and
            are trained with the weights (LSQ, Esser et al., arXiv 1902.08153). Zero points do not change. It only
            affects "prepare".

    Raises:
        TypeError: base_config is not a configuration.
        ValueError: step is neither, or base_config is not supported; the message says why.

    Example:
        >>> config = lowbit.int8_dynamic_activation_int4_weight(group_size=32)
        >>> lowbit.quantize_(model, lowbit.training.QATConfig(config))
        >>> train(model)
        >>> lowbit.quantize_(model, lowbit.training.QATConfig(config, step="convert"))
    """

    base_config: FormatConfig | None = None
    _: KW_ONLY
    step: str = "prepare"
    learned_scales: bool = False

    def __post_init__(self) -> None:
        check_step("QATConfig", self.step)
        if self.base_config is None and self.step == "convert":
            return
        object.__setattr__(self, "base_config", config_asked_for("QATConfig: base_config", self.base_config))
        trained_spec(self.base_config, torch.float32, self.learned_scales or self.step == "convert")

    def change_layers(self, model: nn.Module, filter_fn: Any, *, strict: bool, head: Any) -> QuantizationReport:
        if self.step == "convert":
            text = None if self.base_config is None else str(self.base_config)
            return convert(model, str(self), text, filter_fn)
        return _prepare(model, self, filter_fn, strict, head)

    def __str__(self) -> str:
        learned = ", learned_scales=True" if self.learned_scales else ""
        return f"QATConfig({self.base_config}, step={self.step!r}{learned})"


def trained_spec(config: FormatConfig, dtype: torch.dtype, learned_scales: bool) -> LinearSpec:
    """Return the spec that a layer is trained for, whose weight has this dtype.

    Raises:
        ValueError: the configuration is not supported in training.
    """
    spec = config.spec(dtype)
    if spec.is_float:
        raise ValueError(
            f"QATConfig: base_config must have codes, got {config}: train in that dtype instead, model.to(dtype)"
        )
    if spec.format == SEMI_SPARSE:
        raise ValueError(
            f"QATConfig: base_config must not prune, got {config}: train with "
            "lowbit.training.swap_linear_with_semi_sparse_linear, and quantize with pruned=True afterwards"
        )
    if spec.algorithm is not None:
        raise ValueError(
            f"QATConfig: base_config must leave algorithm out, got {config}: {spec.algorithm} finds codes once, and "
            "training would change the weights below them"
        )
    if getattr(config, "scale", None) == "search" and not learned_scales:
        raise ValueError(
            f"QATConfig: base_config must not search for scales, got {config}: a search takes longer than the step; "
            "leave scale out, or take learned_scales=True, which begins with searched ones"
        )
    return replace(spec, scale="absmax", algorithm=None)


def _prepare(model: nn.Module, qat: QATConfig, filter_fn: Any, strict: bool, head: Any) -> QuantizationReport:
    config = qat.base_config
    of_head = head_config("quantize_", head, config)
    if of_head is not None:
        trained_spec(of_head, torch.float32, qat.learned_scales)
    kinds = (LINEAR, EMBEDDING) if qat.learned_scales else (LINEAR, EMBEDDING, EXPERTS)
    selected, skipped = select(model, config, filter_fn, None, strict, kinds=kinds, head=of_head)
    check_devices("QATConfig", selected, kernel="fake_quantize")
    report = QuantizationReport(str(qat), model_bytes_before=model_bytes(model))
    scales: dict[int, tuple[nn.Parameter | None, Tensor | None]] = {}  # by the ids of weights, which may be shared
    rows = {}
    for item in selected:
        key = id(item.value)
        if key not in scales:
            scales[key] = _first_scales(item) if qat.learned_scales else (None, None)
        size, shape = item.value.nbytes, item.weight.shape
        spec, name = replace(item.spec, scale="absmax"), item.row_name
        if kind_of(item.module) is not EXPERTS:
            prepare_in_place(item.module, spec, str(config), *scales[key])
        elif not is_trained(item.module):  # the first of its two weights
            prepare_fake_quantized(item.module, spec, str(config))
        rows[name] = ReportRow(name, spec.name, shape, size, size, note="fake-quantized, to be trained")
    report.rows = in_order(model, rows, skipped)
    if not selected:
        report.notes.append("no layer was selected")
    report.notes += notes_of_float_experts(model, "training of scales") if qat.learned_scales else []
    report.notes += guard(model)
    report.model_bytes_after = model_bytes(model)
    return report


def _first_scales(item: Selected) -> tuple[nn.Parameter, Tensor | None]:
    """Return the scales that the configuration chooses, and the zero points of an asymmetric weight or None."""
    weight, spec = item.weight.matrix(item.value), item.spec
    _, scale, zero = QuantLinear.from_packed(pack_weight(weight, spec)[0], *weight.shape, spec).unpack()
    return nn.Parameter(scale.clone(memory_format=torch.contiguous_format)), zero if spec.asymmetric else None
