# SPDX-License-Identifier: Apache-2.0
"""calibrate_by_layer: GPTQ on a model's own text where the float model does not fit into memory.

The model is loaded with weights that were packed without data, and writes its text with them. Then it reads the whole
text once. A layer that is called gets its float weight from the checkpoint, computes with it, and is packed for the
inputs of this call before the next layer is reached. So the inputs are those of the float model, and only the text is
another: that of a model with coarser weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.checkpoints.merged_weights import merged_weights
from lowbit.checkpoints.names import model_names
from lowbit.formats.algorithms import GPTQ
from lowbit.formats.base import FormatConfig
from lowbit.huggingface.lowbit_config import LowbitConfig
from lowbit.huggingface.quantizer import LowbitQuantizer
from lowbit.quant.calibration import Calibration, collected, counting
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.evaluation import evaluating
from lowbit.quant.free_memory import available_bytes
from lowbit.quant.kinds import kind_of, weights_of
from lowbit.quant.own_text import body_of, gptq_of_own_text, own_text, told_of_own_text
from lowbit.quant.packing import Selected, check_finite
from lowbit.quant.quantize import by_gptq, pack_calibrated
from lowbit.quant.report import QuantizationReport, ReportRow
from lowbit.quant.safetensors_file import SafetensorsFile, safetensors_files
from lowbit.quant.shared_inputs import SharedInputs
from lowbit.tables.folding import told

PART_OF_MEMORY = 0.5
"""The part of the free memory that float weights may take, beside the copy that writes, and moments of inputs."""


def fits(source: Path) -> bool:
    """Return whether the float weights of a folder can be in memory during a calibration."""
    size = sum(path.stat().st_size for path in safetensors_files(source))
    return size <= PART_OF_MEMORY * available_bytes()


def calibrated_by_layer(source: Path, settings: LowbitConfig, skeleton: nn.Module) -> nn.Module:
    """Return the model of a folder, packed as `settings` say with a calibration on its own text.

    Args:
        source: the folder.
        settings: the formats.
        skeleton: its model on the meta device.

    Raises:
        ValueError: what `calibrate_by_layer` raises; or the float weight of a layer to calibrate is shared, or made of
            others while transformers loads it.
    """
    quantizer = LowbitQuantizer(settings, pre_quantized=False)
    quantizer.select(skeleton)
    formats = {}
    for name, config in quantizer.selection.layers.items():
        spec = config.spec(torch.float32)
        has_inputs = kind_of(skeleton.get_submodule(name)).multiplies
        if has_inputs and (isinstance(spec.algorithm, GPTQ) or (spec.scale == "search" and spec.algorithm is None)):
            formats[name] = config
    shared = [name for name in formats if len(quantizer.selection.shared_with(name)) > 1]
    if shared:
        raise ValueError(
            f"quantize_checkpoint: a calibration layer by layer needs weights that no other layer has, got "
            f"{told(shared)}; give them a format of 8 bits"
        )
    read = _reader(source, skeleton)
    given = _without_data(settings)
    model = type(skeleton).from_pretrained(source, quantization_config=given, dtype="auto", local_files_only=True)
    calibrate_by_layer(model, model.hf_quantizer.report, formats, read)
    return model


def _without_data(settings: LowbitConfig) -> LowbitConfig:
    """Return the settings without a calibration, and with nearest codes where GPTQ is named."""

    def plain(config: Any) -> Any:
        gptq = isinstance(config, FormatConfig) and isinstance(config.spec(torch.float32).algorithm, GPTQ)
        return replace(config, algorithm=None) if gptq else config  # type: ignore[type-var]

    return LowbitConfig(
        plain(settings.config),
        settings.modules_to_not_convert,
        plan={name: plain(config) for name, config in settings.plan.items()},
        embeddings=settings.embeddings,
        head=plain(settings.head),
    )


def _reader(source: Path, skeleton: nn.Module) -> Callable[[str], Tensor]:
    """Return a function that reads the float weight of a parameter from the files of a folder."""
    homes = {
        key: file for path in safetensors_files(source) for file in (SafetensorsFile(path),) for key in file.entries
    }
    keys = {name: key for key, name in model_names(skeleton, homes).items() if name is not None}
    merged = merged_weights(skeleton, homes)

    def read(name: str) -> Tensor:
        if name not in merged and name not in keys:
            raise ValueError(
                f"quantize_checkpoint: {name} must be in the files of {source} to be calibrated layer by layer; "
                "transformers makes it out of others while it loads"
            )
        tensor = lambda key: homes[key].read(key)  # noqa: E731
        value = merged[name].value(tensor) if name in merged else tensor(keys[name])
        check_finite("quantize_checkpoint", f"{name} of {source}", value)
        return value

    return read


def calibrate_by_layer(
    model: nn.Module,
    report: QuantizationReport,
    formats: Mapping[str, FormatConfig],
    read: Callable[[str], Tensor],
) -> None:
    """Pack layers of a packed model anew, one by one, for their inputs on the model's own text.

    Args:
        model: the packed model.
        report: its report, whose rows of these layers are replaced.
        formats: the configurations of the layers to pack anew, by their names.
        read: a function that returns the float weight of a parameter.

    Raises:
        ValueError: the model needs data; its text does not reach a layer, or calls one twice; or inputs or logits are
            not finite.
    """
    work = _ByLayer(formats, read, gptq_of_own_text(model))
    text = torch.cat([batch["input_ids"] for batch in own_text(model)])
    note = f"calibrated on {told_of_own_text(model)}, with weights packed without data; then layer by layer"
    hooks = [hook for name in formats for hook in work.hooks(name, model.get_submodule(name))]
    try:
        with torch.no_grad(), evaluating(model), changing_layers(model):
            body_of(model, formats)(input_ids=text, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    missed = [name for name in formats if name not in work.done]
    if missed:
        raise ValueError(f"calibrate_by_layer: the text must reach every layer, got none of {told(missed)}")
    report.rows = [work.rows.get(row.layer, row) for row in report.rows]
    report.notes.append(note)


class _ByLayer:
    """The layers that were packed anew, and the moments of the one that is called."""

    def __init__(self, formats: Mapping[str, FormatConfig], read: Callable[[str], Tensor], algorithm: GPTQ) -> None:
        self.formats, self.read, self.algorithm = formats, read, algorithm
        self.calibration = Calibration()
        self.done: set[str] = set()
        self.rows: dict[str, ReportRow] = {}

    def hooks(self, name: str, module: nn.Module) -> list[Any]:
        """Let a layer become float before a call, and packed after it."""

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in self.done:
                raise ValueError(
                    f"calibrate_by_layer: each layer must be called once with a text, got two calls of {name}: its "
                    "inputs are known only if the whole float model is in memory"
                )
            self._begin(name, module, args, kwargs)

        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._end(name, module)

        return [module.register_forward_pre_hook(begin, with_kwargs=True), module.register_forward_hook(end)]

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = kind_of(module)
        values = {weight.key: self.read(f"{name}.{weight.key}") for weight in weights_of(module)}
        kind.give_back(module, {key: nn.Parameter(value, requires_grad=False) for key, value in values.items()})
        seen = SharedInputs()
        counting(seen, name, True)(module, args, kwargs)
        self.calibration = collected(seen, {name: module})

    def _end(self, name: str, module: nn.Module) -> None:
        self.done.add(name)
        for weight in weights_of(module):
            value = module._parameters[weight.key]
            item = Selected.of(name, module, weight, self.formats[name].spec(value.dtype), value)
            for row in pack_calibrated(by_gptq(item, self.algorithm), self.calibration):
                self.rows[row.layer] = row
        self.calibration = Calibration()
