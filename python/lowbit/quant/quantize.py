# SPDX-License-Identifier: Apache-2.0
"""quantize_: turn the linear layers of a model into QuantLinear, one after the other, in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowbit import _C, devices
from lowbit.formats.base import FormatConfig, TrainingConfig
from lowbit.formats.block_sparse import BlockSparseWeightConfig
from lowbit.formats.torchao import from_torchao
from lowbit.quant.adapters import adopt_lora_layers
from lowbit.quant.calibration import Calibration
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.fast_path import disable_encoder_fast_path
from lowbit.quant.linear_layers import features_of, is_conv1d, is_embedding, matrix_of
from lowbit.quant.load_check import check_state_dicts_of
from lowbit.quant.output_head import INT8, head_config
from lowbit.quant.packing import pack_weight
from lowbit.quant.quant_embedding import ROW_MAJOR, quantize_embedding_in_place
from lowbit.quant.quant_linear import quantize_in_place
from lowbit.quant.report import FloatWeight, QuantizationReport, ReportRow, model_bytes
from lowbit.quant.select import FilterFn, Selected, Skipped, calibration_of, inputs_of, select

PROGRESS_BYTES = 10**9  # selected weights above this get a progress bar


def quantize_(
    model: nn.Module,
    config: FormatConfig | Any,
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
        filter_fn: called with (module, qualified name), True selects nn.Linear, or nn.Embedding, which becomes a
            `QuantEmbedding`. Default: every nn.Linear, and Conv1D of transformers, but those whose weight
            something else reads or computes; the report lists those that were left out, with reasons. Adapters of
            peft stay float.
        device: moves weights there, layer by layer, "cpu" or a device with kernels; None wants them there already.
        strict: raise where the default filter would skip a linear layer, or when nothing is selected.
        calibration: of ``lowbit.calibrate``, or an iterable of batches, which is given to it: errors then count
            as the inputs of each layer say. For configurations whose scales are searched for (int4 by default),
            and for `GPTQ`.
        head: of the output head of a language model (``model.get_output_embeddings()``), and of a table of tokens that
            is tied to it: "int8" gives it 8 bits where ``config`` has fewer or is 2:4, and both one packed weight. None
            stores the head as config says, and leaves the table float. A configuration is taken as it is.

    Returns:
        A QuantizationReport: print it, show it in a notebook, or take ``to_dict()``.

    Raises:
        TypeError: config is no configuration, filter_fn is no function of two arguments or selects something else than
            nn.Linear and nn.Embedding, or a weight is not float32, bfloat16 or float16.
        ValueError: a selected layer is already quantized, its weight is not finite or not on the cpu, an embedding has
            max_norm or is of a subclass; strict;
            calibration has not seen a layer, is not used by the configuration, or GPTQ lacks it.

    Example:
        >>> report = lowbit.quantize_(model, lowbit.int4_weight_only(group_size=128))
    """
    config = _check_arguments(model, config)
    if isinstance(config, TrainingConfig):
        _check_is_none(config, device=device, calibration=calibration)
        return config.apply(model, filter_fn, strict=strict, head=head)
    device = _checked_device(device)
    of_head = head_config("quantize_", head, config)
    selected, skipped = select(model, config, filter_fn, device, strict, embeddings=True, head=of_head)
    seen = calibration_of(model, calibration, config, selected)
    report = QuantizationReport(str(config), model_bytes_before=model_bytes(model))
    rows = {}
    with changing_layers(model):
        for group in _progress(by_weight(selected), report):
            rows |= {row.layer: row for row in _quantize_group(group, device, seen)}
    if not selected:
        report.notes.append(
            "no layer was selected" if filter_fn else "the model has no nn.Linear that can be quantized"
        )
    tell_and_protect(model, report, rows, skipped)
    adopt_lora_layers(model)
    report.model_bytes_after = model_bytes(model)
    return report


def _check_arguments(model: Any, config: Any) -> FormatConfig | TrainingConfig:
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_: model must be a torch.nn.Module, got {type(model).__name__}")
    config = from_torchao(config)
    if not isinstance(config, FormatConfig | TrainingConfig):
        got = config.__name__ if isinstance(config, type) or callable(config) else type(config).__name__
        other = "; lowbit.sparsify_ takes it" if isinstance(config, BlockSparseWeightConfig) else ""
        raise TypeError(
            f"quantize_: config must be a configuration such as lowbit.int8_weight_only(), got {got}{other}"
        )
    return config


def _check_is_none(config: TrainingConfig, **arguments: Any) -> None:
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


def by_weight(selected: list[Selected]) -> list[list[Selected]]:
    """Group layers that share one Parameter."""
    groups: dict[tuple[int, bool], list[Selected]] = defaultdict(list)
    for item in selected:
        groups[id(item.module.weight), is_conv1d(item.module)].append(item)
    return list(groups.values())


def _progress(groups: list[list[Selected]], report: QuantizationReport) -> Iterable[list[Selected]]:
    if sum(group[0].module.weight.nbytes for group in groups) < PROGRESS_BYTES:
        return groups
    try:
        from tqdm.auto import tqdm
    except ImportError:
        report.notes.append("install tqdm for a progress bar on models of this size")
        return groups
    return tqdm(groups, desc="quantize_", unit="layer")


def _quantize_group(
    group: list[Selected], device: torch.device | None, calibration: Calibration | None
) -> Iterator[ReportRow]:
    """Pack the one weight of these layers and hand it to all of them; the float weight dies with its
    last owner here."""
    first = group[0]
    weight: torch.Tensor = matrix_of(first.module, first.module.weight)
    before, shape = weight.nbytes, features_of(first.module)
    if device is not None and weight.device.type not in (device.type, "meta"):
        weight = weight.detach().to(device)
        for item in group:
            _move_bias(item.module, device)
    layout = ROW_MAJOR if all(is_embedding(item.module) for item in group) else _C.LAYOUT  # tied: that of the linear
    packed, distortion = pack_weight(weight, first.spec, inputs_of(group, calibration), layout)
    for item in group:
        spec = replace(item.spec, algorithm=None)
        if is_embedding(item.module):
            quantize_embedding_in_place(item.module, packed, spec, layout)
        else:
            quantize_in_place(item.module, packed, spec)
        row = ReportRow.packed(item.name, item.spec, shape, before, distortion, item.kernel, item.note)
        row = replace(row, bytes_after=packed.nbytes)  # in its layout
        if item is not first:
            row = replace(row, bytes_before=0, bytes_after=0, note=f"shares the weight of {first.name}")
        yield row


def _move_bias(module: nn.Module, device: torch.device) -> None:
    if getattr(module, "bias", None) is not None:
        module.bias = nn.Parameter(module.bias.detach().to(device), requires_grad=module.bias.requires_grad)


def tell_and_protect(
    model: nn.Module, report: QuantizationReport, rows: dict[str, ReportRow], skipped: list[Skipped]
) -> None:
    """Fill the report of a model whose layers have changed, and keep torch and state dicts from misreading them."""
    rows |= {item.name: ReportRow.skipped(item.name, item.module, item.reason) for item in skipped}
    report.rows = [rows[name] for name, _ in model.named_modules() if name in rows]
    report.left = _left(model, rows)
    fast_path = disable_encoder_fast_path(model)
    report.notes += [fast_path] if fast_path else []
    check_state_dicts_of(model)


def _left(model: nn.Module, rows: Iterable[str]) -> list[FloatWeight]:
    """The float weights (two dimensions or more) that no row is about: embeddings, convolutions, experts."""
    told = {id(parameter) for name in rows for parameter in model.get_submodule(name).parameters(recurse=False)}
    left: dict[int, FloatWeight] = {}
    for prefix, module in model.named_modules():
        for key, weight in module._parameters.items():
            if weight is None or id(weight) in told | left.keys() or weight.dim() < 2 or not weight.is_floating_point():
                continue
            name = f"{prefix}.{key}" if prefix else key
            left[id(weight)] = FloatWeight(name, type(module).__name__, tuple(weight.shape), weight.nbytes)
    return list(left.values())
