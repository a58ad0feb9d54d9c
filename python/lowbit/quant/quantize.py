# SPDX-License-Identifier: Apache-2.0
"""quantize_: turn the linear layers of a model into QuantLinear, one by one, in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lowbit import devices
from lowbit.formats.algorithms import GPTQ
from lowbit.formats.base import FormatConfig
from lowbit.formats.block_sparse import BlockSparseWeightConfig
from lowbit.formats.torchao import from_torchao
from lowbit.quant.calibration import Calibration, calibration_of, inputs_of
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.kinds import KINDS
from lowbit.quant.load_check import guard
from lowbit.quant.output_head import INT8, head_config
from lowbit.quant.packing import Selected, by_weight, pack_group, pack_weight
from lowbit.quant.report import FloatWeight, QuantizationReport, ReportRow, in_model_order, model_bytes
from lowbit.quant.select import FilterFn, Skipped, select

PROGRESS_BYTES = 10**9  # selected weights above this get a progress bar


class AppliedConfig(Protocol):
    """A configuration that changes the layers itself: those of `lowbit.training`, whose layers are packed later."""

    def change_layers(self, model: nn.Module, filter_fn: Any, *, strict: bool, head: Any) -> QuantizationReport:
        """Change the layers of ``model`` for ``quantize_``, after every check, and return the report."""


def quantize_(
    model: nn.Module,
    config: FormatConfig | AppliedConfig | Any,
    filter_fn: FilterFn | None = None,
    device: torch.device | str | None = None,
    *,
    strict: bool = False,
    calibration: Calibration | Iterable[Any] | None = None,
    head: FormatConfig | str | None = INT8,
) -> QuantizationReport:
    """Quantize the selected linear layers of ``model`` in place and return a report.

    Layers are packed one by one and each float weight is freed at once, so memory peaks at the model plus one layer.
    Layers that share a weight share the packed one. On the meta device only the structure changes; load a quantized
    state dict with ``assign=True`` then. Every check comes before the first change. The config of a model of
    transformers says then that it is packed, for ``save_pretrained`` and ``from_pretrained``.

    Args:
        model: any module; its layers keep their identity, hooks and bias.
        config: a configuration, e.g. ``lowbit.int8_dynamic_activation_int4_weight(group_size=32)``, or one of torchao's
            own; one that lowbit does not have is refused, and the error names a replacement. Or
            ``lowbit.training.QATConfig(config)``, with which layers are trained first.
        filter_fn: called with (module, qualified name), True selects nn.Linear, experts, or nn.Embedding, which becomes
            a `QuantEmbedding`. Default: every nn.Linear, Conv1D of transformers, and module of experts
            (`QuantExperts`), but those whose weight something else reads or computes; the report lists those that were
            left out, with reasons. Adapters of peft stay float.
        device: moves weights there, layer by layer, "cpu" or a device with kernels; None wants them there already.
        strict: raise where the default filter would skip a linear layer, or when nothing is selected.
        calibration: a result of ``lowbit.calibrate``, or an iterable of batches, which is given to it: errors then
            count as the inputs of each layer say. For configurations whose scales are searched for (int4 by default),
            and for `GPTQ`.
        head: the configuration of the output head of a language model (``model.get_output_embeddings()``), and of a
            table of tokens that is tied to it: "int8" gives it 8 bits where ``config`` has fewer or is 2:4, and both
            one packed weight. None stores the head as config says, and leaves the table float. A configuration is taken
            as it is.

    Returns:
        A QuantizationReport: print it, show it in a notebook, or take ``to_dict()``.

    Raises:
        TypeError: config is no configuration, filter_fn is no function of two arguments or selects something else than
            nn.Linear, nn.Embedding and experts, or a weight is not float32, bfloat16 or float16.
        ValueError: a selected layer is already quantized, its weight is not finite or not on the cpu, an embedding has
            max_norm or is of a subclass; strict;
            calibration has not seen a layer, is not used by the configuration, or GPTQ lacks it.

    Example:
        >>> report = lowbit.quantize_(model, lowbit.int4_weight_only(group_size=128))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_: model must be a torch.nn.Module, got {type(model).__name__}")
    if change_layers := getattr(type(config), "change_layers", None):
        _check_is_none(config, device=device, calibration=calibration)
        return change_layers(config, model, filter_fn, strict=strict, head=head)
    config = config_asked_for("quantize_: config", config)
    device = _checked_device(device)
    has_no_head = head == INT8 and not hasattr(model, "get_output_embeddings")  # no language model
    of_head = None if has_no_head else head_config("quantize_", head, config)
    selected, skipped = select(model, config, filter_fn, device, strict, kinds=KINDS, head=of_head)
    if calibration is not None:
        calibration = calibration_of(model, calibration, config, selected)
    elif any(isinstance(item.spec.algorithm, GPTQ) and not item.value.is_meta for item in selected):
        raise ValueError("quantize_: GPTQ needs calibration=batches, or of lowbit.calibrate(..., hessian=True)")
    report = QuantizationReport(str(config), model_bytes_before=model_bytes(model))
    rows: list[ReportRow] = []
    with changing_layers(model):
        for group in _progress(by_weight(selected), report):
            rows += _quantize_group(group, device, calibration)
    if not selected:
        report.notes.append(
            "no layer was selected" if filter_fn else "the model has no nn.Linear that can be quantized"
        )
    tell_and_guard(model, report, rows, [*selected, *skipped])
    report.model_bytes_after = model_bytes(model)
    return report


def config_asked_for(argument: str, config: Any) -> FormatConfig:
    """Return the configuration that an argument asks for: ours as it is, one of torchao's as ours.

    Raises:
        TypeError: it is another object; names the argument, and a replacement of one of torchao's.
    """
    if isinstance(config, FormatConfig):
        return config
    config = from_torchao(config)
    if isinstance(config, FormatConfig):
        return config
    got = config.__name__ if isinstance(config, type) or callable(config) else type(config).__name__
    other = "; lowbit.sparsify_ takes it" if isinstance(config, BlockSparseWeightConfig) else ""
    raise TypeError(f"{argument} must be a configuration such as lowbit.int8_weight_only(), got {got}{other}")


def _check_is_none(config: AppliedConfig, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"quantize_: {name} must be None with {config}, got a {type(value).__name__}")


def _checked_device(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    device = torch.device(device)
    if reason := devices.places.refuses_layers(device):
        raise ValueError(f"quantize_: device must be None or have kernels here, got device={str(device)!r} ({reason})")
    return device


def _progress(groups: list[list[Selected]], report: QuantizationReport) -> Iterable[list[Selected]]:
    if sum(group[0].value.nbytes for group in groups) < PROGRESS_BYTES:
        return groups
    try:
        from tqdm.auto import tqdm
    except ImportError:
        report.notes.append("install tqdm for a progress bar on models of this size")
        return groups
    return tqdm(groups, desc="quantize_", unit="layer")


def _quantize_group(
    group: list[Selected], device: torch.device | None, calibration: Calibration | None
) -> list[ReportRow]:
    """Pack the one weight of these layers and hand it to all of them; the float weight dies with its last owner."""
    first = group[0]
    before, weight = first.value.nbytes, first.weight.matrix(first.value.detach())
    if device is not None and weight.device.type not in (device.type, "meta"):
        weight = weight.to(device)
        for item in group:
            _move_bias(item, device)
    inputs = None if calibration is None else inputs_of(group, calibration)
    return pack_group(group, lambda layout: pack_weight(weight, first.spec, inputs, layout), before)[1]


def _move_bias(item: Selected, device: torch.device) -> None:
    key = item.weight.bias
    bias = item.module._parameters.get(key)
    if bias is not None:
        item.module._parameters[key] = nn.Parameter(bias.detach().to(device), requires_grad=bias.requires_grad)


def tell_and_guard(
    model: nn.Module, report: QuantizationReport, rows: list[ReportRow], items: Sequence[Selected | Skipped]
) -> None:
    """Fill the report of a model with the lines of the layers that have changed and of those that were skipped, and
    guard the former."""
    skipped = [item for item in items if isinstance(item, Skipped)]
    rows = rows + [ReportRow.skipped(item.name, item.module, item.reason) for item in skipped]
    report.rows = in_model_order(model, rows)
    report.left = _left(model, [item.module for item in items])
    report.notes += guard(model)


def _left(model: nn.Module, modules: Iterable[nn.Module]) -> list[FloatWeight]:
    """The float weights (two dimensions or more) that no line is about: embeddings, convolutions, routers."""
    told = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    left: dict[int, FloatWeight] = {}
    for prefix, module in model.named_modules():
        for key, weight in module._parameters.items():
            if weight is None or id(weight) in told | left.keys() or weight.dim() < 2 or not weight.is_floating_point():
                continue
            name = f"{prefix}.{key}" if prefix else key
            left[id(weight)] = FloatWeight(name, type(module).__name__, tuple(weight.shape), weight.nbytes)
    return list(left.values())
