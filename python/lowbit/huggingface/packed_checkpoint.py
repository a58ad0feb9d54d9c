# SPDX-License-Identifier: Apache-2.0
"""``LowbitConfig("checkpoint")``: from_pretrained with the packed weights of a checkpoint of another method.

The packed weights are read before transformers reads the files, of which it then takes the float tensors alone: while
it does, the layers to pack have no weight, so that it neither misses nor initializes one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.quantizers.auto import AutoHfQuantizer

from lowbit.checkpoints.methods.reader import CheckpointReader
from lowbit.checkpoints.methods.settings import settings_of
from lowbit.checkpoints.names import model_names
from lowbit.checkpoints.stored_layers import untie
from lowbit.huggingface.lowbit_config import LowbitConfig
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.kinds import kind_of
from lowbit.quant.load import stored_weights
from lowbit.quant.permuted_linear import PERMUTATION, hold_permutation


class PackedCheckpoint:
    """The packed weights of a checkpoint, and their places in a model that from_pretrained is about to load.

    Args:
        model: the model, on the meta device.
        files: the files of the checkpoint.
        activations: the argument of LowbitConfig.
        device_map: the devices of modules.

    Raises:
        ValueError: a device is not the CPU, where weights are packed (``model.to`` moves them); config.json names no
            method that lowbit reads, the files are no safetensors, or a tensor is not as the method has it.
    """

    def __init__(
        self, model: nn.Module, files: list[str], activations: str | None, device_map: Mapping[str, Any]
    ) -> None:
        elsewhere = {str(device) for device in device_map.values()} - {"cpu"}
        if elsewhere:
            raise ValueError(
                "from_pretrained: device_map must be 'cpu' with LowbitConfig('checkpoint'), got "
                f"{', '.join(sorted(elsewhere))}; model.to(device) moves the packed model"
            )
        if not files or not all(file.endswith(".safetensors") for file in files):
            raise ValueError(
                "from_pretrained: LowbitConfig('checkpoint') reads safetensors files, got "
                f"{', '.join(files) or 'a state dict'}"
            )
        settings = settings_of(Path(files[0]).parent)
        if settings is None:
            raise ValueError(
                f"from_pretrained: LowbitConfig('checkpoint') needs {Path(files[0]).parent / 'config.json'} with a "
                'quantization_config, and there is none; LowbitConfig("int4_weight_only") packs a float checkpoint'
            )
        reader = CheckpointReader(model, [*map(Path, files)], settings, activations)
        self.state = reader.packed()
        self.weights = [*stored_weights(model, self.state)]
        self.unset = [module._parameters[weight.key] for _, module, weight, _ in self.weights]
        for _, module, weight, _ in self.weights:
            module._parameters[weight.key] = None
            module._is_hf_initialized = True
        untie(model, {name for name, *_ in self.weights})
        known = model_names(model, reader.read_keys)
        read = {known[key] or key for key in reader.read_keys} | reader.read_keys | reader.merged.keys()
        model._adjust_missing_and_unexpected_keys = functools.partial(_adjust_without, model, read)

    def hold(self, model: nn.Module) -> None:
        """Give the layers their packed weights. The config of the model then names their formats
        (config_entry.py)."""
        del model._adjust_missing_and_unexpected_keys
        for (_, module, weight, _), unset in zip(self.weights, self.unset, strict=True):
            module._parameters[weight.key] = unset  # the kinds of layers are told by their parameters
        with changing_layers(model):
            for name, module, weight, stored in self.weights:
                packed = nn.Parameter(self.state[f"{name}.{weight.key}"], requires_grad=False)
                kind_of(module).hold(module, weight.key, packed, stored, model.dtype)
                permutation = self.state.get(f"{name}.{PERMUTATION}")
                if permutation is not None:
                    hold_permutation(module, permutation)
        self.state.clear()


def _adjust_without(model: Any, read: set[str], loading_info: Any) -> None:
    """Do what transformers does, and take the tensors that were read here out of those that it did not expect."""
    type(model)._adjust_missing_and_unexpected_keys(model, loading_info)
    loading_info.unexpected_keys -= read


def prefer_lowbit_config() -> None:
    """Let ``from_pretrained(quantization_config=LowbitConfig("checkpoint"))`` pass for a checkpoint of any method.

    transformers takes the checkpoint's own method and refuses an argument of another class, before it asks either.
    Every other argument is handed on.
    """
    merge = AutoHfQuantizer.merge_quantization_configs.__func__

    @functools.wraps(merge)
    def merged(cls: type, quantization_config: Any, quantization_config_from_args: Any = None) -> Any:
        given = quantization_config_from_args
        if isinstance(given, LowbitConfig) and given.checkpoint:
            return given
        return merge(cls, quantization_config, given)

    AutoHfQuantizer.merge_quantization_configs = classmethod(merged)
