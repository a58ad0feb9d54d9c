# SPDX-License-Identifier: Apache-2.0
"""transformers: ``from_pretrained(..., quantization_config=lowbit.LowbitConfig(...))``, and checkpoints that say so.

Importing this module registers the quantization method "lowbit" with transformers; lowbit does so itself as soon as
transformers is imported (when_imported.py), also in a program that never names lowbit. Weights are packed one by one as
they are read, so that the float model is never in memory as a whole; packed weights are read from a checkpoint by the
numbers beside each (``layout``), which need no configuration.

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
from lowbit.checkpoints.names import LayoutRenaming, renamed, stored_tensors
from lowbit.checkpoints.stored_layers import hold_stored, leave_bias, repack
from lowbit.huggingface.config_entry import note_formats
from lowbit.huggingface.lowbit_config import METHOD, LowbitConfig
from lowbit.huggingface.resizing import refuse_to_resize_packed_tables
from lowbit.huggingface.selection import Selection
from lowbit.models.fuse import fuse
from lowbit.quant.changing_layers import OBSERVERS
from lowbit.quant.dequantize import dequantize_
from lowbit.quant.kinds import LayerWeight, is_packed, layout_name, packed_weights, weights_of
from lowbit.quant.load import RENAMINGS
from lowbit.quant.load_check import guard
from lowbit.quant.packing import Selected, check_finite, hold_packed, pack_group, pack_weight
from lowbit.quant.report import QuantizationReport, ReportRow, in_model_order, model_bytes
from lowbit.tables.folding import folded


class LowbitQuantizer(HfQuantizer):
    """The quantization method that ``from_pretrained`` calls.

    ``model.hf_quantizer.report`` is the `QuantizationReport` of a model that was quantized while it was loaded; it is
    empty where the checkpoint was quantized before.
    """

    quantization_config: LowbitConfig

    def __init__(self, quantization_config: LowbitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.selection: Selection | None = None  # the layers to pack; None where the checkpoint is
        self.packed: list[tuple[Selected, ReportRow]] = []  # the weights that were packed
        self.files: list[str] = []
        self.converted: set[tuple[str, ...]] = set()  # results of transformers' converters that are packed now
        self.is_float = False  # though the config says that the checkpoint is packed
        self.report = QuantizationReport(
            str("gguf" if quantization_config.gguf else quantization_config.config or "by plan")
        )
        self.gguf_file: str | None = None
        self.model_config: PreTrainedConfig | None = None  # set by from_pretrained until it has made the model
        if quantization_config.gguf:
            # With another method from_pretrained refuses gguf_file; validate_environment, its next step, takes it back.
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
        """Note the configuration of which from_pretrained is about to make the model, and refuse one that is to be cut
        among processes: no earlier call knows of either."""
        self.model_config = config
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
        """Everything lives where the kernels are: "auto" and the like mean the CPU."""
        return {"": "cpu"} if isinstance(device_map, str) else device_map

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        self.update_attn_implementation(model.config)
        self.files = list(checkpoint_files or ())
        model._adjust_bias = leave_bias
        if self.gguf_file is not None:
            return  # get_state_dict is next
        if self.quantization_config.gguf and not self.pre_quantized:
            raise ValueError(
                'from_pretrained: LowbitConfig("gguf") needs gguf_file=, the name of the file in the folder'
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
        self.report.rows += self.select(model)

    def read_header(self, gguf_file: str) -> None:
        """Note the file, and make the configuration say what lowbit reads in it: transformers leaves out keys that
        change the numbers."""
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
        """The dtype of parameters that are not packed: float32 where neither the caller nor the file says it."""
        return torch.float32 if dtype is None else dtype

    def get_state_dict(self, gguf_file: str, model: nn.Module) -> dict[str, Tensor]:
        """Read all parameters of the model from a GGUF file, packed, and make its layers those that hold them."""
        from lowbit.checkpoints.gguf.errors import errors_of
        from lowbit.checkpoints.gguf.file import GgufFile
        from lowbit.checkpoints.gguf.weights import StateReader

        with errors_of(gguf_file, "the weights"):
            state = StateReader(GgufFile.open(gguf_file), model, self.quantization_config.activations).read()
        hold_stored(model, state)
        return state

    def select(self, model: nn.Module) -> list[ReportRow]:
        """Note the layers to pack, each with its configuration; return the rows of those that stay float."""
        settings, kept = self.quantization_config, self.quantization_config.modules_to_not_convert
        settings.check_can_pack()
        keep, keep_embeddings = (
            self.get_modules_to_not_convert(model, names, model._keep_in_fp32_modules) for names in (kept, kept or [])
        )
        self.selection = Selection(model, settings, keep, keep_embeddings)
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
        """Make the layer of this weight a QuantLinear or QuantEmbedding; False where it is none of ours or
        of another shape."""
        if not self.param_needs_quantization(model, param_name):
            return False
        item = self.selection.selected(param_name, value)
        if value.shape != item.value.shape:  # transformers refuses it, or begins the layer anew
            del self.selection.layers[item.name]
            reason = "its weight in the checkpoint has another shape"
            self.report.rows.append(ReportRow.skipped(item.name, item.module, reason))
            return False
        check_finite("from_pretrained", f"{item.weight.key} of {item.name}", value)
        matrix, layout = item.weight.matrix(value), self.selection.layout(item.name)
        make = functools.partial(pack_weight, matrix, item.spec, None)
        packed, rows = pack_group([item], make, value.nbytes, layout=layout)
        for tensor in (packed, item.module._buffers[layout_name(item.weight.key)]):
            tensor._is_hf_initialized = True
        self.packed.append((item, *rows))
        release_pages(value, self.files)
        return True

    def get_weight_conversions(self) -> list[Any]:
        """Those of transformers, and that of layouts."""
        return [*super().get_weight_conversions(), LayoutRenaming()]

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        """Leave those out that would convert a packed weight of the checkpoint by its name (Qwen3-VL-MoE transposes
        experts, unless they have the shape of a float parameter)."""
        names = [f"{name}.{weight.key}" for name, module in model.named_modules() for weight in _packed_of(module)]
        return [
            item
            for item in super().update_weight_conversions(weight_conversions, model)
            if not (isinstance(item, WeightConverter) and any(item.rename_source_key(name)[1] for name in names))
        ]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        del model._adjust_bias
        if self.is_float:
            self.remove_quantization_config(model)
            return model
        if self.selection is not None:
            self._join_tied(model, self.selection)
        repack(model)
        guard(model)
        # A weight that a converter split or merged is packed now: it is saved under the names that the model has
        # for it.
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [
            item
            for item in conversions
            if tuple(item.target_patterns) not in self.converted and not isinstance(item, LayoutRenaming)
        ]
        if self.selection is not None:
            self._finish_report(model)
        if self.quantization_config.fuse:
            fuse(model)
        return model

    def _join_tied(self, model: nn.Module, selection: Selection) -> None:
        """Make those layers packed ones too whose weight transformers tied to a packed one."""
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
        before = report.bytes_before - report.bytes_after
        report.model_bytes_before = report.model_bytes_after - sum(part.nbytes for part in numbers) + before

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        formats = {module.spec.name for module in model.modules() if is_packed(module)}
        return model.state_dict(), metadata_of(sorted(formats))

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        # ``dtype`` is that of model.config, which save_pretrained turns into text.
        dequantize_(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """With adapters: packed weights are frozen, gradients go through them."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class PackWeight(ConversionOps):
    """The conversion that transformers runs on a weight that it has read: a QuantLinear holds it from then on; other
    weights go on as they are."""

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
    """Why layers stay float, those of one reason together."""
    lines = folded(rows, attrgetter("note"), attrgetter("layer"))
    return "; ".join(f"{names}: {items[0].note}" for names, items in lines) or "it has none that can be"


def metadata_of(formats: list[str]) -> dict[str, str]:
    """Return the words of a safetensors file about its packed weights; the numbers beside each decide."""
    return {
        "lowbit.version": _C.version,
        "lowbit.layout": _C.LAYOUT,
        "lowbit.layout_version": str(_C.LAYOUT_VERSION),
        "lowbit.formats": ", ".join(formats),
    }


register_quantization_config(METHOD)(LowbitConfig)
register_quantizer(METHOD)(LowbitQuantizer)
RENAMINGS.append(renamed)
OBSERVERS.append(note_formats)
refuse_to_resize_packed_tables()
