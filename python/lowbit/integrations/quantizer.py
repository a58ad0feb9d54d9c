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

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationMethod

from lowbit import _C, devices
from lowbit.formats.spec import LinearSpec
from lowbit.integrations.checkpoint_names import renamed, stored_tensors
from lowbit.integrations.fuse import fuse
from lowbit.integrations.lowbit_config import METHOD, LowbitConfig
from lowbit.integrations.mapped_pages import release_pages
from lowbit.integrations.resizing import refuse_to_resize_packed_tables
from lowbit.integrations.selection import Selection, tied_modules
from lowbit.quant.dequantize import dequantize_
from lowbit.quant.fast_path import disable_encoder_fast_path
from lowbit.quant.layout import in_layout
from lowbit.quant.linear_layers import features_of, is_embedding, matrix_of
from lowbit.quant.load import PACKED, RENAMINGS, packed_layers
from lowbit.quant.load_check import check_state_dicts_of
from lowbit.quant.quant_embedding import QuantEmbedding, quantize_embedding_in_place
from lowbit.quant.quant_linear import QuantLinear, all_finite, pack_weight, quantize_in_place
from lowbit.quant.report import QuantizationReport, ReportRow, model_bytes
from lowbit.quant.select import serving_kernel


class LowbitQuantizer(HfQuantizer):
    """The quantization method that ``from_pretrained`` calls.

    ``model.hf_quantizer.report`` is the `QuantizationReport` of a model that was quantized while it was loaded; it is
    empty where the checkpoint was quantized before.
    """

    quantization_config: LowbitConfig

    def __init__(self, quantization_config: LowbitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.selection: Selection | None = None  # the layers to pack; None where the checkpoint is
        self.files: list[str] = []
        self.converted: set[tuple[str, ...]] = set()  # results of transformers' converters that are packed now
        self.report = QuantizationReport(
            str("gguf" if quantization_config.gguf else quantization_config.config or "by plan")
        )
        self.gguf_file: str | None = None
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

    def update_device_map(self, device_map: Any) -> Any:
        """Everything lives where the kernels are: "auto" and the like mean the CPU."""
        return {"": "cpu"} if isinstance(device_map, str) else device_map

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        self.files = list(checkpoint_files or ())
        if self.gguf_file is not None:
            return  # get_state_dict is next
        if self.quantization_config.gguf and not self.pre_quantized:
            raise ValueError(
                'from_pretrained: LowbitConfig("gguf") needs gguf_file=, the name of the file in the folder'
            )
        if self.pre_quantized:
            _hold_stored(model, stored_tensors(model, self.files))
            return
        self.report.rows += self.select(model)

    def read_header(self, gguf_file: str) -> None:
        """Note the file, as from_pretrained tells it before it makes the model."""
        self.gguf_file = gguf_file

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype of parameters that are not packed: float32 where neither the caller nor the file says it."""
        return torch.float32 if dtype is None else dtype

    def get_state_dict(self, gguf_file: str, model: nn.Module) -> dict[str, Tensor]:
        """Read all parameters of the model from a GGUF file, packed, and make its layers those that hold them."""
        from lowbit.integrations.gguf.errors import errors_of
        from lowbit.integrations.gguf.file import GgufFile
        from lowbit.integrations.gguf.weights import StateReader

        with errors_of(gguf_file, "the weights"):
            state = StateReader(GgufFile.open(gguf_file), model, self.quantization_config.activations).read()
        _hold_stored(model, state)
        return state

    def select(self, model: nn.Module) -> list[ReportRow]:
        """Note the layers to pack, each with its configuration; return the rows of those that stay float."""
        settings, kept = self.quantization_config, self.quantization_config.modules_to_not_convert
        keep, keep_embeddings = (
            self.get_modules_to_not_convert(model, names, model._keep_in_fp32_modules) for names in (kept, kept or [])
        )
        self.selection = Selection(model, settings, keep, keep_embeddings)
        return self.selection.left

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        name, _, key = param_name.rpartition(".")
        return key == "weight" and self.selection is not None and name in self.selection.layers

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        if not self.param_needs_quantization(model, param_name):
            return param.element_size()
        name = param_name.removesuffix(".weight")
        n, k = features_of(model.get_submodule(name))
        return self.selection.spec(name, param.dtype).bytes(n, k) / (n * k)

    def get_quantize_ops(self) -> Any:
        return PackWeight(self)

    def pack(self, model: nn.Module, param_name: str, value: Tensor) -> bool:
        """Make the layer of this weight a QuantLinear or QuantEmbedding; False where it is none of ours or
        of another shape."""
        if not self.param_needs_quantization(model, param_name):
            return False
        name = param_name.removesuffix(".weight")
        module = model.get_submodule(name)
        if value.shape != module.weight.shape:  # transformers refuses it, or begins the layer anew
            del self.selection.layers[name]
            self.report.rows.append(ReportRow.skipped(name, module, "its weight in the checkpoint has another shape"))
            return False
        if not all_finite(value):
            raise ValueError(f"from_pretrained: weight of {name} must be finite, got inf or nan")
        (n, k), spec = features_of(module), self.selection.spec(name, value.dtype)
        layout = self.selection.layout(name)
        packed, distortion = pack_weight(matrix_of(module, value), spec, layout=layout)
        kernel = serving_kernel(spec, n, k, value, embedding=is_embedding(module))
        _become_packed(module, packed, replace(spec, algorithm=None), layout)
        for tensor in (packed, module.layout):
            tensor._is_hf_initialized = True
        row = ReportRow.packed(name, spec, (n, k), value.nbytes, distortion, kernel)
        self.report.rows.append(replace(row, bytes_after=packed.nbytes))  # in its layout
        release_pages(value, self.files)
        return True

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        if self.selection is not None:
            self._join_tied(model, self.selection)
        _repack(model)
        disable_encoder_fast_path(model)
        check_state_dicts_of(model)
        # A weight that a converter split or merged is packed now: it is saved under the names that the model has
        # for it.
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [item for item in conversions if tuple(item.target_patterns) not in self.converted]
        if self.selection is not None:
            self._finish_report(model)
        if self.quantization_config.fuse:
            fuse(model)
        return model

    def _join_tied(self, model: nn.Module, selection: Selection) -> None:
        """Make those layers packed ones too whose weight transformers tied to a packed one."""
        for row in [row for row in self.report.rows if row.format]:
            packed = model.get_submodule(row.layer)
            for name in selection.shared_with(row.layer):
                module = model.get_submodule(name)
                if isinstance(module, PACKED) or module.weight is not packed.weight:
                    continue
                spec = replace(packed.spec, x_format=selection.spec(name, model.dtype).x_format)
                _become_packed(module, packed.weight, spec, selection.layout(name), model.dtype)
                like = packed.weight.new_empty(0, dtype=model.dtype)
                kernel = serving_kernel(spec, *row.shape, like, embedding=is_embedding(module))
                self.report.rows.append(row.shared(name, spec, kernel))

    def _finish_report(self, model: nn.Module) -> None:
        report = self.report
        for name in self.selection.layers:
            module = model.get_submodule(name)
            if not isinstance(module, PACKED):
                report.rows.append(ReportRow.skipped(name, module, "its weight is not in the checkpoint"))
        order = {name: i for i, (name, _) in enumerate(model.named_modules())}
        report.rows.sort(key=lambda row: order[row.layer])
        numbers = sum(module.layout.nbytes for module in model.modules() if isinstance(module, PACKED))
        report.model_bytes_after = model_bytes(model)
        report.model_bytes_before = report.model_bytes_after - numbers + report.bytes_before - report.bytes_after

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        formats = {module.spec.name for module in model.modules() if isinstance(module, PACKED)}
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


def metadata_of(formats: list[str]) -> dict[str, str]:
    """Return the words of a safetensors file about its packed weights; the numbers beside each decide."""
    return {
        "lowbit.version": _C.version,
        "lowbit.layout": _C.LAYOUT,
        "lowbit.layout_version": str(_C.LAYOUT_VERSION),
        "lowbit.formats": ", ".join(formats),
    }


def _become_packed(
    module: nn.Module, weight: nn.Parameter, spec: LinearSpec, layout: str, dtype: torch.dtype | None = None
) -> None:
    if is_embedding(module):
        quantize_embedding_in_place(module, weight, spec, layout, dtype)
    else:
        quantize_in_place(module, weight, spec)


def _hold_stored(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Make every layer whose packed weight the files hold a QuantLinear or QuantEmbedding on the meta device, in the
    layout of the file. Of tied weights the files may hold one."""
    for name, shared in tied_modules(model).items():
        weight = next((stored[f"{other}.weight"] for other in shared if f"{other}.weight" in stored), None)
        if weight is not None:
            stored.setdefault(f"{name}.weight", weight)
    for name, (module, layer) in dict(packed_layers(model, stored)).items():
        weight = torch.empty(layer.shape, dtype=torch.uint8, device="meta")
        _become_packed(module, nn.Parameter(weight, requires_grad=False), layer.spec, layer.layout)
        module.layout = torch.empty_like(stored[f"{name}.layout"], device="meta")
        # transformers would draw random numbers for the packed weight of a table whose tied head alone is in the file.
        module._is_hf_initialized = is_embedding(module)


def _repack(model: nn.Module) -> None:
    """Repack each weight that the checkpoint held in another layout or version, one after the other; tied ones stay
    one, in the layout of the linear layer."""
    repacked: dict[int, tuple[Tensor, nn.Parameter]] = {}  # with the old one, so that its id stays its own
    for module in model.modules():
        if not isinstance(module, QuantLinear):
            continue
        held = {"weight": module.weight, "layout": module.layout}
        if (wanted := in_layout(held, "")) is not held:
            new = held["weight"], nn.Parameter(wanted["weight"], requires_grad=False)
            module.weight, module.layout = repacked.setdefault(id(held["weight"]), new)[1], wanted["layout"]
    for module in model.modules():
        if isinstance(module, QuantEmbedding) and id(module.weight) in repacked:
            module._hold(repacked[id(module.weight)][1], module.spec, _C.LAYOUT, module.like.dtype)


register_quantization_config(METHOD)(LowbitConfig)
register_quantizer(METHOD)(LowbitQuantizer)
RENAMINGS.append(renamed)
refuse_to_resize_packed_tables()
