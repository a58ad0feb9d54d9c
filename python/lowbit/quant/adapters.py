# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft on quantized layers: quantize_ leaves them float, and a LoRA layer merges into a QuantLinear.

peft gives a QuantLinear, which is an nn.Linear, its LoRA layer for float weights; that one trains, but its merge adds
to the stored weight. `extend_dispatch` puts `QuantLoraLinear` into peft's dispatch for them when peft is imported
(huggingface/peft_lora.py), before or after this package: merging decodes the weight, lets peft add to it, and packs
the sum; unmerging restores the original bytes. A weight that was loaded in between counts as merged, as peft treats
float layers: unmerging subtracts the adapter from it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from lowbit.formats.semi_sparse import FORMAT as SEMI_SPARSE
from lowbit.quant.kinds import is_packed, weights_of
from lowbit.quant.packing import pack_weight
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.safetensors_file import bytes_of


def adapter_modules(model: nn.Module) -> set[int]:
    """Return the ids of all modules that are adapters of peft or copies that it trains."""
    found: set[int] = set()
    for module in model.modules():
        if not any(cls.__module__.startswith("peft.") for cls in type(module).__mro__):
            continue
        for path in getattr(module, "adapter_layer_names", ()):
            child: Any = module
            for name in path.split("."):
                child = getattr(child, name, None)
            if isinstance(child, nn.Module):
                found.update(map(id, child.modules()))
    return found


def adopt_lora_layers(model: nn.Module) -> None:
    """Bring adapters of peft up to layers that have become packed, or float again, since peft came: its LoRA layer for
    floats becomes the one that merges into a QuantLinear, and adapters are told how a Conv1D's weight lies now."""
    peft = sys.modules.get("peft.tuners.lora.layer")
    for module in model.modules() if peft is not None else ():
        base = module.get_base_layer() if hasattr(module, "get_base_layer") else None
        if type(module) is peft.Linear and isinstance(base, QuantLinear):
            module.__class__ = _lora_linear(peft.Linear)
        if base is not None and any(weight.transposed for weight in weights_of(base)):
            _set_transposed(module, base, not is_packed(base))


def _set_transposed(layer: nn.Module, base: nn.Module, transposed: bool) -> None:
    """Tell an adapter layer and its parts, such as DoRA's, whether the weight of their base lies as ``[k, n]``."""
    for part in layer.modules():
        if part is not base and hasattr(part, "fan_in_fan_out"):
            part.fan_in_fan_out = transposed


def extend_dispatch(module: ModuleType) -> None:
    """Wrap the last of the dispatchers in `peft.tuners.lora.model`; one that is already wrapped, or has gone, stays."""
    dispatch = getattr(module, "dispatch_default", None)
    if dispatch is None or hasattr(dispatch, "_before_lowbit"):
        return

    @functools.wraps(dispatch)
    def dispatch_default(target: nn.Module, adapter_name: str, *args: Any, **options: Any) -> nn.Module | None:
        layer = dispatch(target, adapter_name, *args, **options)
        linear = sys.modules["peft.tuners.lora.layer"].Linear
        if type(layer) is linear and isinstance(layer.get_base_layer(), QuantLinear):
            layer.__class__ = _lora_linear(linear)
        return layer

    dispatch_default._before_lowbit = dispatch  # type: ignore[attr-defined]
    module.dispatch_default = dispatch_default  # type: ignore[attr-defined]


@functools.cache
def _lora_linear(linear: type[nn.Module]) -> type[nn.Module]:
    """Make the subclass of peft's ``lora.Linear``; importable by its name, so that models pickle."""

    class QuantLoraLinear(linear):  # type: ignore[misc, valid-type]
        """LoRA on a QuantLinear: merged, the packed weight holds the sum; unmerged, it is the one from before."""

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            base = self.get_base_layer()
            if not isinstance(base, QuantLinear):
                return super().merge(safe_merge, adapter_names)
            if base.spec.format == SEMI_SPARSE:
                raise ValueError(
                    "merge: a 2:4 weight has no room for a dense adapter; lowbit.dequantize_(model) comes before"
                )
            packed, merged = base.weight, list(self.merged_adapters)
            original = self._packed_before_merge() if merged else packed
            bias = None if base.bias is None else base.bias.detach().clone()
            try:
                with _decoded(base) as dense:
                    super().merge(safe_merge, adapter_names)
                    changed = self.merged_adapters != merged
                    weight = pack_weight(dense.weight, base.spec)[0] if changed else packed
            except BaseException:
                self.merged_adapters[:] = merged
                if bias is not None:
                    base.bias.data.copy_(bias)
                raise
            base.weight = weight
            if changed:
                self.__dict__["before_merge"] = original, _checksum(weight)

        def unmerge(self) -> None:
            base = self.get_base_layer()
            if not isinstance(base, QuantLinear) or not self.merged:
                return super().unmerge()
            original = self._packed_before_merge()
            with _decoded(base) as dense:
                super().unmerge()
                weight = pack_weight(dense.weight, base.spec)[0] if original is None else original
            base.weight = weight
            self.__dict__.pop("before_merge", None)

        def _packed_before_merge(self) -> nn.Parameter | None:
            """The weight that merging replaced; None if another one was loaded since."""
            original, merged = self.__dict__.get("before_merge", (None, None))
            return original if merged == _checksum(self.get_base_layer().weight) else None

        def __repr__(self) -> str:
            return super().__repr__().replace("lora.Linear", "lora.QuantLoraLinear")

    QuantLoraLinear.__qualname__ = "QuantLoraLinear"
    globals()["QuantLoraLinear"] = QuantLoraLinear
    return QuantLoraLinear


def _checksum(weight: Tensor) -> int:
    """Tell one packed weight from another, also in copies of the layer."""
    return 0 if weight.is_meta else zlib.crc32(bytes_of(weight.detach().cpu().contiguous()))


@contextlib.contextmanager
def _decoded(base: QuantLinear) -> Iterator[nn.Linear]:
    """Make the layer an nn.Linear with the decoded weight while peft changes it; at the end it is
    a QuantLinear again."""
    kind, packed = type(base), base.weight
    (key,) = (weight.key for weight in weights_of(base))
    base._parameters[key] = nn.Parameter(base.dequantize(), requires_grad=False)
    base.__class__ = nn.Linear  # also for calls of merge and unmerge from inside, as DoRA makes them
    try:
        yield base
    finally:
        base.__class__ = kind
        base._parameters[key] = packed


def __getattr__(name: str) -> Any:
    if name != "QuantLoraLinear":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import peft.tuners.lora.layer as layer

    return _lora_linear(layer.Linear)
