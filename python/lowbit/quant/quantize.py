# SPDX-License-Identifier: Apache-2.0
"""quantize_: turn the linear layers of a model into packed layers, one by one, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowbit import devices
from lowbit.formats.algorithms import GPTQ
from lowbit.formats.base import FormatConfig
from lowbit.formats.block_sparse import BlockSparseWeightConfig
from lowbit.formats.text import config_of
from lowbit.formats.torchao import from_torchao
from lowbit.quant.calibration import Calibration, calibration_of, inputs_of, without_inputs
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.kinds import KINDS, kind_of, layout_of_all, weights_of
from lowbit.quant.load_check import guard
from lowbit.quant.output_head import INT8, head_config
from lowbit.quant.own_text import gptq_of_own_text, is_own_text, told_of_own_text
from lowbit.quant.packing import Selected, by_weight, pack_group, pack_weight, pack_weights
from lowbit.quant.report import FloatWeight, QuantizationReport, ReportRow, in_model_order, model_bytes
from lowbit.quant.select import FilterFn, Skipped, reason_to_skip, select

PROGRESS_BYTES = 10**9  # total size of the selected weights from which on a progress bar is shown
GPTQ_COST = 50  # how much longer GPTQ takes than a search


class AppliedConfig(Protocol):
    """A configuration that changes layers itself, such as those of `lowbit.training`, whose layers are packed later."""

    def change_layers(self, model: nn.Module, filter_fn: Any, *, strict: bool, head: Any) -> QuantizationReport:
        """Change the layers of ``model`` after all checks have passed, and return the report of ``quantize_``."""


def quantize_(
    model: nn.Module,
    config: FormatConfig | AppliedConfig | Any,
    filter_fn: FilterFn | None = None,
    device: torch.device | str | None = None,
    *,
    strict: bool = False,
    calibration: Calibration | Iterable[Any] | str | None = None,
    tokenizer: Callable[..., Any] | None = None,
    head: FormatConfig | str | None = INT8,
) -> QuantizationReport:
    """Quantize the selected linear layers of ``model`` in place and return a report.

    Layers are packed one by one, and each float weight is freed immediately, so the peak memory is that of the model
    plus one layer. Layers that share a weight share the packed weight. All checks are made before the first change. On
    the meta device only the structure changes; load a quantized state dict with ``assign=True`` afterwards. The config
    of a model of transformers is updated, so that ``save_pretrained`` and ``from_pretrained`` work.

    Args:
        model: any module; its layers keep their identity, hooks and bias.
        config: a configuration, such as ``lowbit.int8_dynamic_activation_int4_weight(group_size=32)``, its text, or one
            of torchao's own. If lowbit has no equivalent, the error names a replacement. With
            ``lowbit.training.QATConfig(config)``, layers are prepared for training instead.
        filter_fn: called with (module, qualified name) of every module; True selects it. It may select nn.Linear,
            modules of experts, and nn.Embedding, which becomes a `QuantEmbedding`. None selects every nn.Linear, every
            Conv1D of transformers, and every module of experts (`QuantExperts`), except those whose weight is computed,
            or read by other code; the report lists these with the reasons. Adapters of peft always stay float.
        device: the device that weights are moved to, layer by layer: "cpu" or a device with kernels. None expects them
            to be on such a device already.
        strict: raise an error if the default filter skips a linear layer, or if nothing is selected.
        calibration: a result of ``lowbit.calibrate``, or batches for it. Errors are then weighted by the inputs of each
            layer. It is used by configurations that search for scales (int4 by default) and by `GPTQ`. "self" needs no
            data: a language model writes 16 texts of 192 tokens, an encoder is given random words, and GPTQ chooses the
            codes of all layers whose format it can. The time and memory that this takes are printed before it starts.
        tokenizer: a tokenizer of transformers, if the batches are text.
        head: the format of a language model's output head (``model.get_output_embeddings()``) and of a token embedding
            that is tied to it, which then shares the packed weight. "int8" gives them ``config``, or 8 bits if that
            has fewer or is 2:4 sparse. None treats the head like any other layer, and leaves the embedding float.
            Otherwise a configuration.

    Returns:
        A QuantizationReport, which can be printed, shown in a notebook, or converted by ``to_dict()``.

    Raises:
        TypeError: config is not a configuration; filter_fn is not a function of (module, name), or selects anything
            other than nn.Linear, nn.Embedding and experts; or a weight is not float32, bfloat16 or float16.
        ValueError: a selected layer is already quantized; its weight is not finite, or on a device without kernels; an
            embedding has max_norm or is of a subclass; strict is True and a layer was skipped; calibration does not
            cover a layer or has no use with this configuration, or is "self" for a model that needs data (vision,
            speech, encoder with decoder); or GPTQ has no calibration.

    Example:
        >>> report = lowbit.quantize_(model, lowbit.int4_weight_only(group_size=128))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_: model must be a torch.nn.Module, got {type(model).__name__}")
    if change_layers := getattr(type(config), "change_layers", None):
        _check_is_none(config, device=device, calibration=calibration, tokenizer=tokenizer)
        return change_layers(config, model, filter_fn, strict=strict, head=head)
    config = config_asked_for("quantize_: config", config)
    device = _checked_device(device)
    has_no_head = head == INT8 and not hasattr(model, "get_output_embeddings")  # no language model
    of_head = None if has_no_head else head_config("quantize_", head, config)
    selected, skipped = select(model, config, filter_fn, device, strict, kinds=KINDS, head=of_head)
    report = pack_selected(model, str(config), selected, skipped, calibration, tokenizer, device)
    if not selected:
        note = "no layer was selected" if filter_fn else "the model has no nn.Linear that can be quantized"
        report.notes.insert(0, note)
    return report


def pack_selected(
    model: nn.Module,
    config: str,
    selected: list[Selected],
    skipped: Sequence[Skipped],
    calibration: Calibration | Iterable[Any] | str | None,
    tokenizer: Callable[..., Any] | None,
    device: torch.device | None = None,
) -> QuantizationReport:
    """Pack the selected weights of a model, with a calibration if one is given, and return the report of
    ``quantize_``.

    Args:
        model: the model.
        config: the configuration, in words.
        selected, skipped: the weights to pack, and the layers that stay float.
        calibration, tokenizer, device: the arguments of ``quantize_``.
    """
    own = is_own_text(calibration)
    if own:
        told = told_of_own_text(model)
        selected = [by_gptq(item, gptq_of_own_text(model)) for item in selected]
    if calibration is not None:
        calibration = calibration_of(model, calibration, config, selected, tokenizer)
    elif tokenizer is not None:
        raise ValueError("quantize_: tokenizer must be None without calibration=texts, got calibration=None")
    elif any(isinstance(item.spec.algorithm, GPTQ) and not item.value.is_meta for item in selected):
        raise ValueError(
            "quantize_: calibration must be batches, or a result of lowbit.calibrate(..., hessian=True), for GPTQ, "
            "got None"
        )
    report = QuantizationReport(config, model_bytes_before=model_bytes(model))
    if own:
        report.notes.append(f"calibrated on {told}")
    rows: list[ReportRow] = []
    with changing_layers(model):
        for groups in _progress(with_same_inputs(by_weight(selected), calibration), report):
            rows += _quantize_groups(groups, device, calibration)
    tell_and_guard(model, report, rows, [*selected, *skipped])
    report.model_bytes_after = model_bytes(model)
    return report


def config_asked_for(argument: str, config: Any) -> FormatConfig:
    """Return a configuration of lowbit unchanged, and convert one of torchao, or the text of one.

    Args:
        argument: the name of the argument, for error messages.
        config: the configuration.

    Raises:
        TypeError: ``config`` is anything else, or lowbit has no equivalent; then the message names a replacement.
        ValueError: the text is no configuration.
    """
    if isinstance(config, FormatConfig):
        return config
    if isinstance(config, str):
        try:
            return config_of(config)
        except ValueError as error:
            raise ValueError(f"{argument}: {str(error).removeprefix('config: ')}") from None
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


def by_gptq(item: Selected, algorithm: GPTQ) -> Selected:
    """Return the weight with codes by this algorithm, if its format searches for scales and it is multiplied by inputs;
    otherwise unchanged."""
    return replace(item, spec=item.spec.with_gptq(algorithm)) if kind_of(item.module).multiplies else item


def with_same_inputs(groups: list[list[Selected]], calibration: Calibration | None) -> list[list[list[Selected]]]:
    """Join the weights that GPTQ can round at once, because their layers share inputs and format."""
    joined: dict[Any, list[list[Selected]]] = {}
    for group in groups:
        first, key = group[0], id(group)
        if calibration is not None and isinstance(first.spec.algorithm, GPTQ) and not first.value.is_meta:
            moments = [calibration.layers.get(item.row_name) for item in group if kind_of(item.module).multiplies]
            if len(moments) == 1 and moments[0] is not None:
                key = id(moments[0].squares), first.spec
        joined.setdefault(key, []).append(group)
    return [*joined.values()]


def _progress(steps: list[list[list[Selected]]], report: QuantizationReport) -> Iterable[list[list[Selected]]]:
    sizes = {isinstance(groups[0][0].spec.algorithm, GPTQ): 0 for groups in steps}
    for groups in steps:
        gptq = isinstance(groups[0][0].spec.algorithm, GPTQ)
        sizes[gptq] += sum(group[0].value.nbytes for group in groups)
    if sizes.get(False, 0) + sizes.get(True, 0) * GPTQ_COST < PROGRESS_BYTES:
        return steps
    try:
        from tqdm.auto import tqdm
    except ImportError:
        report.notes.append("install tqdm for a progress bar on models of this size")
        return steps
    layers = len({id(item.module) for groups in steps for group in groups for item in group})
    return _counted(steps, tqdm(total=layers, desc="quantize_", unit="layer"))


def _counted(steps: list[list[list[Selected]]], bar: Any) -> Iterable[list[list[Selected]]]:
    """Move the bar on by layers: a weight may be that of several, and one of experts has several weights."""
    done: set[int] = set()
    with bar:
        for groups in steps:
            yield groups
            done.update(id(item.module) for group in groups for item in group)
            bar.update(len(done) - bar.n)


def _quantize_groups(
    groups: list[list[Selected]], device: torch.device | None, calibration: Calibration | None
) -> list[ReportRow]:
    """Pack the weights of these groups of layers, which share inputs if there are several. Each is assigned to all
    layers of its group, which frees the float weight."""
    before = [group[0].value.nbytes for group in groups]
    weights = [_weight_of(group, device) for group in groups]
    first = groups[0][0]
    inputs = None if calibration is None else inputs_of(groups[0], calibration)
    if inputs is not None and (remark := without_inputs(first, calibration)):
        first = replace(first, note=f"{first.note}; {remark}" if first.note else remark)
        groups = [[first, *groups[0][1:]]]
    if len(groups) == 1:
        return pack_group(groups[0], lambda layout: pack_weight(weights[0], first.spec, inputs, layout), before[0])[1]
    layouts = [layout_of_all(item.module for item in group) for group in groups]
    rows: list[ReportRow] = []
    for group, packed, size in zip(groups, pack_weights(weights, first.spec, inputs, layouts), before, strict=True):
        rows += pack_group(group, lambda layout, packed=packed: packed, size)[1]
    return rows


def pack_calibrated(item: Selected, calibration: Calibration) -> list[ReportRow]:
    """Pack a weight that no other layer shares, with a calibration of its layer, and return its report row.

    Raises:
        ValueError: the calibration has no inputs of the layer.
    """
    calibration_of(item.module, calibration, item.spec.name, [item])
    return _quantize_groups([[item]], None, calibration)


def _weight_of(group: list[Selected], device: torch.device | None) -> Tensor:
    """Return the weight of a group of layers on the device that they go to, where their biases already are."""
    weight = group[0].weight.matrix(group[0].value.detach())
    if device is not None and weight.device.type not in (device.type, "meta"):
        weight = weight.to(device)
        for item in group:
            _move_bias(item, device)
    return weight


def _move_bias(item: Selected, device: torch.device) -> None:
    key = item.weight.bias
    bias = item.module._parameters.get(key)
    if bias is not None:
        item.module._parameters[key] = nn.Parameter(bias.detach().to(device), requires_grad=bias.requires_grad)


def tell_and_guard(
    model: nn.Module, report: QuantizationReport, rows: list[ReportRow], items: Sequence[Selected | Skipped]
) -> None:
    """Complete the report of a model with the rows of changed and skipped layers, and guard the changed layers (see
    load_check.py)."""
    skipped = [item for item in items if isinstance(item, Skipped)]
    rows = rows + [ReportRow.skipped(item.name, item.module, item.reason) for item in skipped]
    report.rows = in_model_order(model, rows)
    report.left = float_weights(model, [item.module for item in items])
    report.notes += guard(model)


def float_weights(model: nn.Module, modules: Iterable[nn.Module]) -> list[FloatWeight]:
    """Return the float weights of at least two dimensions that have no row: embeddings, convolutions, routers."""
    told = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    left: dict[int, FloatWeight] = {}
    for prefix, module in model.named_modules():
        for key, weight in module._parameters.items():
            if weight is None or id(weight) in told | left.keys() or weight.dim() < 2 or not weight.is_floating_point():
                continue
            name = f"{prefix}.{key}" if prefix else key
            packable = bool(weights_of(module)) and not reason_to_skip(module)
            left[id(weight)] = FloatWeight(name, type(module).__name__, tuple(weight.shape), weight.nbytes, packable)
    return list(left.values())
