# SPDX-License-Identifier: Apache-2.0
"""Experts that a checkpoint stores separately, packed one by one while ``from_pretrained`` reads them.

transformers merges the experts of a layer (``experts.7.gate_proj.weight``) into one parameter, for which it holds them
all, and twice while it stacks them. `SeparateExperts` takes the place of such a conversion: it reads, converts and
packs an expert at a time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import WeightConverter

from lowbit.checkpoints.merged_weights import merges_experts, missing_experts
from lowbit.quant.kinds import LayerWeight
from lowbit.quant.packing import Matrices, check_finite


class SeparateExperts(WeightConverter):
    """A conversion that packs the experts of a layer as it reads them, if they are to be packed."""

    __slots__ = ()

    @classmethod
    def of(cls, converter: WeightConverter) -> WeightConverter:
        """Return this conversion in place of one that merges experts, or any other one as it is."""
        if not merges_experts(converter):
            return converter
        patterns = converter._original_source_patterns, converter._original_target_patterns
        made = cls(*(each.copy() for each in patterns), operations=converter.operations, force_cpu=converter.force_cpu)
        made.scope_prefix, made.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
        return made

    def convert(
        self,
        layer_name: str,
        model: nn.Module | None = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Any]:
        """Pack the experts into the layer and return nothing, or what transformers makes of them if they stay float."""
        if self.quantization_operation is None:
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)
        path, _, weight = hf_quantizer.selection.find(layer_name)
        self._check_count(path, weight, self.layer_targets[layer_name])
        readers = {pattern: self.collected_tensors.pop(pattern) for pattern in [*self.collected_tensors]}

        def expert(number: int) -> Tensor:
            tensors = {pattern: of_pattern[number]() for pattern, of_pattern in readers.items()}
            parts: dict[str, Any] = {pattern: [tensor] for pattern, tensor in tensors.items()}
            for operation in self.operations:
                parts = operation.convert(
                    parts,
                    source_patterns=self.source_patterns,
                    target_patterns=self.target_patterns,
                    full_layer_name=layer_name,
                    model=model,
                    config=config,
                    missing_keys=None,
                )
            (value,) = parts.values()  # a copy: MergeModulelist stacks
            for tensor in tensors.values():
                hf_quantizer.release(tensor)
            label = f"expert {number} of {layer_name}"
            if value.shape[1:] != weight.float_shape[1:]:
                wanted, got = list(weight.float_shape[1:]), list(value.shape[1:])
                raise ValueError(f"from_pretrained: {label} must have shape {wanted}, got {got} in the checkpoint")
            check_finite("from_pretrained", label, value)
            return weight.matrix(value[0])

        hf_quantizer.pack_separately(layer_name, Matrices(weight.experts, expert))
        hf_quantizer.converted.add(tuple(self.target_patterns))
        loading_info.missing_keys.discard(layer_name)
        return {}

    def _check_count(self, path: str, weight: LayerWeight, keys: set[str]) -> None:
        parts = len(self.source_patterns)
        if missing := missing_experts(keys, parts, weight.experts):
            told = ", ".join(map(str, missing[:5])) + ", ..." * (len(missing) > 5)
            got = f"not all tensors of expert {told}"
        elif len(keys) > weight.experts * parts:
            got = f"{len(keys)} tensors in place of {weight.experts * parts}"
        else:
            return
        raise ValueError(
            f"from_pretrained: the checkpoint must have the {weight.experts} experts of {path}, got {got} for "
            f"{weight.key}"
        )
