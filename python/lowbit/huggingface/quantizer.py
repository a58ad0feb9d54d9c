# SPDX-License-Identifier: Apache-2.0
"""The quantization method "lowbit" of transformers: ``from_pretrained(...,
quantization_config=lowbit.LowbitConfig(...))``, and the loading of checkpoints that lowbit packed.

Importing this module registers the method. lowbit does so as soon as transformers is imported (when_imported.py), even
in a program that never mentions lowbit. Weights are packed one by one as they are read, so the whole float model is
never in memory. Packed weights of a checkpoint are read with the layout numbers stored next to each, without a
configuration.

Example:
    >>> config = lowbit.LowbitConfig("int4_weight_only(group_size=32)")
    >>> model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)
    >>> model.save_pretrained(folder)
    >>> AutoModelForCausalLM.from_pretrained(folder)
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationMethod

from lowbit import _C, devices
from lowbit.checkpoints.mapped_pages import release_pages
from lowbit.checkpoints.methods.reader import read_folder
from lowbit.checkpoints.names import LayoutRenaming, renamed, stored_tensors
from lowbit.checkpoints.stored_layers import hold_stored, leave_bias, repack
from lowbit.formats.base import FormatConfig
from lowbit.huggingface.config_entry import note_formats
from lowbit.huggingface.lowbit_config import METHOD, LowbitConfig
from lowbit.huggingface.packed_checkpoint import PackedCheckpoint, prefer_lowbit_config
from lowbit.huggingface.resizing import refuse_to_resize_packed_tables
from lowbit.huggingface.selection import Selection
from lowbit.huggingface.separate_experts import SeparateExperts
from lowbit.models.fuse import fuse, fuse_writer
from lowbit.quant.changing_layers import OBSERVERS
from lowbit.quant.dequantize import dequantize_
from lowbit.quant.kinds import LayerWeight, is_packed, layout_name, packed_weights, weights_of
from lowbit.quant.load import FOLDER_READERS, RENAMINGS
from lowbit.quant.load_check import guard
from lowbit.quant.own_text import FASTER
from lowbit.quant.packing import Matrices, Selected, check_finite, hold_packed, pack_group, pack_weight
from lowbit.quant.quantize import float_weights, pack_selected
from lowbit.quant.read_weights import say_dtypes
from lowbit.quant.report import QuantizationReport, ReportRow, in_model_order, model_bytes
from lowbit.quant.select import Skipped
from lowbit.tables.folding import folded


class LowbitQuantizer(HfQuantizer):
    """The quantization method that ``from_pretrained`` calls.

    ``model.hf_quantizer.report`` is the `QuantizationReport` of a model that was quantized while it was loaded. It is
    empty if the checkpoint was already quantized.
    """

    quantization_config: LowbitConfig

    def __init__(self, quantization_config: LowbitConfig | FormatConfig, **kwargs: Any) -> None:
        if isinstance(quantization_config, FormatConfig):
            quantization_config = LowbitConfig(quantization_config)
        super().__init__(quantization_config, **kwargs)
        self.selection: Selection | None = None  # the layers to pack, or None if the checkpoint is packed
        self.calibrated: Selection | None = None  # the layers to pack after the whole model is loaded
        self.packed: list[tuple[Selected, ReportRow]] = []  # the weights that were packed
        self.files: list[str] = []
        self.converted: set[tuple[str, ...]] = set()  # targets of transformers' converters that are packed now
        self.is_float = False  # whether the config says "packed" but the files are float
        self.report = QuantizationReport(
            str("gguf" if quantization_config.gguf else quantization_config.config or "by plan")
        )
        self.checkpoint: PackedCheckpoint | None = None  # the packed weights of another method's checkpoint
        self.gguf_file: str | None = None
        self.model_config: PreTrainedConfig | None = None  # set until from_pretrained has created the model
        if quantization_config.gguf:
            # from_pretrained refuses gguf_file with any other method. validate_environment, which it calls next, undoes
            # this.
            quantization_config.quant_method = QuantizationMethod.GGUF

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        self.quantization_config.quant_method = METHOD
        for name, device in device_map.items() if isinstance(device_map, dict) else ():
            reason = "on disk" if device == "disk" else devices.places.refuses_layers(torch.device(device))
            if reason:
                raise ValueError(
                    "from_pretrained: device_map must put every module where lowbit has kernels, "
                    f"got {device!r} for {name or 'the model'!r} ({reason})"
                )

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Record the configuration of the model that from_pretrained is about to create, and refuse to shard it among
        processes. No earlier call has these."""
        self.model_config = config
        if isinstance(getattr(config, "quantization_config", None), FormatConfig):  # as it was given to from_pretrained
            config.quantization_config = self.quantization_config
        distributed = getattr(config, "distributed_config", None)
        parts = {name: getattr(distributed, name, None) or 1 for name in ("tp_size", "dp_size", "pp_size")}
        if any(size > 1 for size in parts.values()):
            told = ", ".join(f"{name}={size}" for name, size in parts.items() if size > 1)
            raise NotImplementedError(
                "from_pretrained: tp_plan, tp_size and distributed_config must be left out for a model that lowbit "
                f"packs, whose weights are not cut among processes, got {told}"
            )
        return config

    def update_device_map(self, device_map: Any) -> Any:
        """Return the device map, with strings such as "auto" replaced by the CPU, where the kernels are."""
        return {"": "cpu"} if isinstance(device_map, str) else device_map

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        self.update_attn_implementation(model.config)
        self.files = list(checkpoint_files or ())
        model._adjust_bias = leave_bias
        if self.quantization_config.checkpoint:
            devices_given = kwargs.get("device_map") or {}
            self.checkpoint = PackedCheckpoint(model, self.files, self.quantization_config.activations, devices_given)
            return
        if self.gguf_file is not None:
            return  # from_pretrained calls get_state_dict next
        if self.quantization_config.gguf and not self.pre_quantized:
            raise ValueError(
                'from_pretrained: gguf_file must name the file in the folder with LowbitConfig("gguf"), got None'
            )
        if self.pre_quantized:
            self.is_float = not hold_stored(model, stored_tensors(model, self.files))
            if self.is_float:
                warnings.warn(
                    f"from_pretrained: quantization_config of {model.config.name_or_path or 'the config'} says that "
                    "lowbit packed the weights, and no file holds a packed one: the model stays float. "
                    "lowbit.quantize_(model, config) packs it; without that entry there is no warning",
                    stacklevel=2,
                )
            return
        left = self.select(model)
        if self.quantization_config.calibration is None:
            self.report.rows += left
        else:  # the float weights are needed until all of them are loaded
            self.calibrated, self.selection = self.selection, None

    def read_header(self, gguf_file: str) -> None:
        """Record the file, and set the attributes that lowbit reads from it in the configuration: transformers ignores
        keys that change the results."""
        from lowbit.checkpoints.gguf.config import attributes_of
        from lowbit.checkpoints.gguf.file import GgufFile

        self.gguf_file = gguf_file
        model_type, attributes = attributes_of(GgufFile.open(gguf_file))
        if model_type != self.model_config.model_type:
            raise ValueError(
                f"from_pretrained: the model_type of {gguf_file} must be {model_type!r}, got "
                f"{self.model_config.model_type!r}"
            )
        for name, value in attributes.items():
            setattr(self.model_config, name, value)

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of parameters that are not packed: float32 unless the caller or the file gives one."""
        return torch.float32 if dtype is None else dtype

    def get_state_dict(self, gguf_file: str, model: nn.Module) -> dict[str, Tensor]:
        """Read all parameters of the model from a GGUF file, packed, and replace the layers by packed ones."""
        from lowbit.checkpoints.gguf.errors import errors_of
        from lowbit.checkpoints.gguf.file import GgufFile
        from lowbit.checkpoints.gguf.weights import StateReader

        with errors_of(gguf_file, "the weights"):
            state = StateReader(GgufFile.open(gguf_file), model, self.quantization_config.activations).read()
        hold_stored(model, state)
        return state

    def select(self, model: nn.Module) -> list[ReportRow]:
        """Record the layers to pack, each with its configuration; return report rows of those that stay float."""
        settings = self.quantization_config
        settings.check_can_pack()
        self.selection = Selection(model, settings, list(model._keep_in_fp32_modules or ()))
        if not self.selection.layers:
            raise ValueError(f"LowbitConfig: no layer of the model would be packed: {_reasons(self.selection.left)}")
        return self.selection.left

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return self.selection is not None and self.selection.find(param_name) is not None

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        if not self.param_needs_quantization(model, param_name):
            return param.element_size()
        name, _, weight = self.selection.find(param_name)
        return weight.bytes(self.selection.layers[name].spec(param.dtype)) / math.prod(weight.shape)

    def get_quantize_ops(self) -> Any:
        return PackWeight(self)

    def pack(self, model: nn.Module, param_name: str, value: Tensor) -> bool:
        """Replace the layer of this weight by a QuantLinear or QuantEmbedding. Return False if it is not to be packed
        or has another shape."""
        if not self.param_needs_quantization(model, param_name):
            return False
        item = self.selection.selected(param_name, value)
        if value.shape != item.value.shape:  # transformers raises an error or reinitializes the layer
            del self.selection.layers[item.name]
            reason = "its weight in the checkpoint has another shape"
            self.report.rows.append(ReportRow.skipped(item.name, item.module, reason))
            return False
        check_finite("from_pretrained", f"{item.weight.key} of {item.name}", value)
        self._pack(item, item.weight.matrix(value), value.nbytes)
        self.release(value)
        return True

    def pack_separately(self, param_name: str, experts: Matrices) -> None:
        """Replace the layer of this weight, whose experts are read one after another."""
        first = next(iter(experts))
        self._pack(self.selection.selected(param_name, first), experts, first.nbytes * len(experts))

    def _pack(self, item: Selected, weight: Tensor | Matrices, before: int) -> None:
        layout = self.selection.layout(item.name)
        make = functools.partial(pack_weight, weight, item.spec, None)
        packed, rows = pack_group([item], make, before, layout=layout)
        for tensor in (packed, item.module._buffers[layout_name(item.weight.key)]):
            tensor._is_hf_initialized = True
        self.packed.append((item, *rows))

    def release(self, value: Tensor) -> None:
        """Release the pages of the checkpoint that a tensor lies in."""
        release_pages(value, self.files)

    def get_weight_conversions(self) -> list[Any]:
        """Return the conversions of transformers and that of layouts."""
        return [*super().get_weight_conversions(), LayoutRenaming()]

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        """Return the conversions without those that match the name of a packed weight. For instance, Qwen3-VL-MoE
        transposes experts unless they have the shape of the float parameter. Experts that are merged and packed are
        packed before they are merged."""
        names = [f"{name}.{weight.key}" for name, module in model.named_modules() for weight in _packed_of(module)]
        return [
            SeparateExperts.of(item) if self.selection is not None and isinstance(item, WeightConverter) else item
            for item in super().update_weight_conversions(weight_conversions, model)
            if not (isinstance(item, WeightConverter) and any(item.rename_source_key(name)[1] for name in names))
        ]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        del model._adjust_bias
        if self.checkpoint is not None:
            self.checkpoint.hold(model)
        if self.is_float:
            self.remove_quantization_config(model)
            return model
        if self.selection is not None:
            self._join_tied(model, self.selection)
        repack(model)
        guard(model)
        say_dtypes(model)
        # A weight that was split or merged while loading is packed now, and is saved under the names of the model.
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [
            item
            for item in conversions
            if tuple(item.target_patterns) not in self.converted and not isinstance(item, LayoutRenaming)
        ]
        if self.selection is not None:
            self._finish_report(model)
        fused = self.quantization_config.fuse
        if self.calibrated is not None:
            self._calibrate(model, self.calibrated)
        if fused:
            fuse(model)
        return model

    def _calibrate(self, model: nn.Module, selection: Selection) -> None:
        """Pack the layers of a float model, as ``quantize_`` does with the calibration of the configuration."""
        settings = self.quantization_config
        selected = [
            selection.selected(f"{name}.{weight.key}" if name else weight.key, module._parameters[weight.key])
            for name in selection.layers
            for module in (model.get_submodule(name),)
            for weight in weights_of(module)
        ]
        for item in selected:
            check_finite("from_pretrained", f"{item.weight.key} of {item.name}", item.value)
        skipped = [Skipped(row.layer, model.get_submodule(row.layer), row.note) for row in selection.left]
        told = str(settings.config or "by plan")
        self.report = pack_selected(model, told, selected, skipped, settings.calibration, settings.tokenizer)

    def _join_tied(self, model: nn.Module, selection: Selection) -> None:
        """Pack the layers whose weight transformers tied to a packed one."""
        for item, row in self.packed:
            self.report.rows.append(row)
            for name in selection.shared_with(item.name):
                module = model.get_submodule(name)
                weights = (weight for weight in weights_of(module) if module._parameters[weight.key] is item.value)
                for weight in () if is_packed(module) else weights:
                    spec = replace(item.module.spec, x_format=selection.layers[name].spec(model.dtype).x_format)
                    like = item.value.new_empty(0, dtype=model.dtype)
                    joined = Selected.of(name, module, weight, spec, like)
                    hold_packed(joined, item.value, selection.layout(name), model.dtype)
                    self.report.rows.append(row.shared(joined.row_name, joined.spec.name, joined.kernel))

    def _finish_report(self, model: nn.Module) -> None:
        report = self.report
        for name in self.selection.layers:
            module = model.get_submodule(name)
            if not is_packed(module):
                report.rows.append(ReportRow.skipped(name, module, "its weight is not in the checkpoint"))
            elif missing := {weight.key for weight in weights_of(module)} - {of.key for of in packed_weights(module)}:
                raise ValueError(
                    f"from_pretrained: the checkpoint must have all weights of {name} in the shape of the model, or "
                    f"none, got no {', '.join(sorted(missing))}"
                )
        if not report.quantized:
            raise ValueError(f"from_pretrained: no weight of the checkpoint was packed: {_reasons(report.rows)}")
        report.rows = in_model_order(model, report.rows)
        packed = [module for module in model.modules() if is_packed(module)]
        numbers = (module._buffers[layout_name(weight.key)] for module in packed for weight in weights_of(module))
        report.model_bytes_after = model_bytes(model)
        report.left = float_weights(model, [model.get_submodule(row.layer) for row in report.skipped])
        before = report.bytes_before - report.bytes_after
        report.model_bytes_before = report.model_bytes_after - sum(part.nbytes for part in numbers) + before

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        formats = {module.spec.name for module in model.modules() if is_packed(module)}
        return model.state_dict(), metadata_of(sorted(formats))

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        # ``dtype`` is that of model.config, which save_pretrained converts to a string.
        dequantize_(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """True: packed weights are frozen, but adapters can be trained, because gradients pass through."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class PackWeight(ConversionOps):
    """The conversion that transformers applies to each weight it reads. It moves weights to pack into packed layers,
    and returns the others unchanged."""

    def __init__(self, quantizer: LowbitQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        target_patterns: list[str],
        model: nn.Module,
        missing_keys: set[str],
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        left = {}
        for name, value in input_dict.items():
            value = value[0] if isinstance(value, list) else value
            if self.quantizer.pack(model, name, value):
                missing_keys.discard(name)
                if name not in target_patterns:  # a converter split or merged the file's tensor
                    self.quantizer.converted.add(tuple(target_patterns))
            else:
                left[name] = value
        return left


def _packed_of(module: nn.Module) -> tuple[LayerWeight, ...]:
    return packed_weights(module) if is_packed(module) else ()


def _reasons(rows: list[ReportRow]) -> str:
    """Return why layers stay float, grouped by reason."""
    lines = folded(rows, attrgetter("note"), attrgetter("layer"))
    return "; ".join(f"{names}: {items[0].note}" for names, items in lines) or "it has none that can be"


def metadata_of(formats: list[str]) -> dict[str, str]:
    """Return the metadata of a safetensors file about its packed weights. It is for information: the layout numbers
    next to each weight decide."""
    return {
        "lowbit.version": _C.version,
        "lowbit.layout": _C.LAYOUT,
        "lowbit.layout_version": str(_C.LAYOUT_VERSION),
        "lowbit.formats": ", ".join(formats),
    }


register_quantization_config(METHOD)(LowbitConfig)
register_quantizer(METHOD)(LowbitQuantizer)
RENAMINGS.append(renamed)
FOLDER_READERS.append(read_folder)
prefer_lowbit_config()
OBSERVERS += [note_formats, say_dtypes]
FASTER.append(fuse_writer)
refuse_to_resize_packed_tables()
