# SPDX-License-Identifier: Apache-2.0
"""LoRA of peft on packed experts: what its layer around a parameter (``target_parameters``) does over a `QuantExperts`.

peft adds the product of the adapter's factors to the whole weight in every call. Packed weights are not decoded for
that: the products of the module get the adapter's part, by the tokens of each expert,

    y[t, j] = W_e x[t] + scaling * B_e (A_e x[t])        e = index[t, j]

Merging decodes and changes one expert at a time, and packs it so that the change is kept (merged_weight.py). Unmerging
brings back the bytes from before the merge; if another weight was loaded in between, it takes the adapter off that one,
as peft does with floats.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.quant.experts import dense_product
from lowbit.quant.kinds import LayerWeight, is_packed, weights_of
from lowbit.quant.lent_weight import without_numbers
from lowbit.quant.merged_weight import merged_experts
from lowbit.quant.safetensors_file import bytes_of

CHANGING = "merge_of_packed_base"
"""An attribute of an adapter layer whose merge has begun, and failed if it is still there."""
_BEFORE = "before_merge"  # the packed weight before the merge, and the checksum of the one after it


class ExpertsAdapter:
    """The functions of a layer of peft around a parameter of packed experts; of other modules they are peft's."""

    def get_param(self: Any) -> Tensor:
        base = self.get_base_layer()
        return without_numbers(base, self._weight()) if is_packed(base) else super().get_param()

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base = self.get_base_layer()
        if not is_packed(base):
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)  # refuses adapter_names
        kwargs.pop("adapter_names", None)
        added = {}
        for layer in _around(self):
            if layer.disable_adapters and layer.merged:
                layer.unmerge()
            elif not layer.disable_adapters and not layer.merged:
                names = [name for name in layer.active_adapters if name in layer.lora_A]
                if names:
                    added[layer.parameter_name] = _part_of(layer._weight(), *layer._factors(names))
        return (_adding(base, added) if added else base)(x, *args, **kwargs)

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        from peft.tuners.tuners_utils import check_adapters_to_merge

        base = self.get_base_layer()
        if not is_packed(base):
            return super().merge(safe_merge, adapter_names)
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        self.__dict__[CHANGING] = True
        before = base._parameters[self.parameter_name]
        if self.merged:  # the weight from before the first merge, unless another one was loaded since
            stored, checksum = self.__dict__.get(_BEFORE, (None, None))
            before = stored if checksum == _checksum(before) else None
        merged = self._with_adapters(base, names, 1.0)
        base._parameters[self.parameter_name] = merged
        self.__dict__[_BEFORE] = before, _checksum(merged)
        self.merged_adapters.extend(names)
        del self.__dict__[CHANGING]

    def unmerge(self: Any) -> None:
        base = self.get_base_layer()
        if not is_packed(base) or not self.merged:
            return super().unmerge()
        before, checksum = self.__dict__.pop(_BEFORE, (None, None))
        if before is None or checksum != _checksum(base._parameters[self.parameter_name]):
            before = self._with_adapters(base, [name for name in self.merged_adapters if name in self.lora_A], -1.0)
        base._parameters[self.parameter_name] = before
        self.merged_adapters.clear()

    def _weight(self: Any) -> LayerWeight:
        return next(weight for weight in weights_of(self.get_base_layer()) if weight.key == self.parameter_name)

    def _factors(self: Any, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return A ``[E, r, k]`` and B ``[E, n, r]`` of all these adapters together, B with their scaling and in the
        order of the packed rows."""
        weight = self._weight()
        downs, ups = [], []
        for name in names:
            left, right, scaling = self.get_delta_factors(name)  # their product lies as the float weight does
            down, up = (left.mT, right.mT) if weight.transposed else (right, left)
            downs.append(down)
            ups.append(up * scaling)
        up = torch.cat(ups, 2)
        return torch.cat(downs, 1), replace(weight, k=up.shape[2], transposed=False).matrix(up)

    @torch.no_grad()
    def _with_adapters(self: Any, base: Any, names: Sequence[str], sign: float) -> nn.Parameter:
        """Return the packed weight with adapters added (or with sign -1 taken off)."""
        key = self.parameter_name
        packed, stored, (down, up) = base._parameters[key], base.stored[key], self._factors(names)

        def expert(number: int) -> Tensor:
            matrix = torch.ops.lowbit.dequantize(packed[number], *stored.spec.weight_args(stored.n, stored.k))
            return matrix.float() + sign * (up[number].float() @ down[number].float())

        return merged_experts(base, self._weight(), expert)


def _around(layer: Any) -> Iterator[Any]:
    """Yield the adapter layers around one module, from the outermost; each has one parameter."""
    while "base_layer" in layer._modules:
        yield layer
        layer = layer._modules["base_layer"]


def _part_of(weight: LayerWeight, down: Tensor, up: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of x ``[T, k]`` or ``[T, J, k]`` and the index ``[T, J]`` that computes the adapter's part of
    a product."""
    rank = down.shape[1]
    first, second = LayerWeight(weight.key, rank, weight.k), LayerWeight(weight.key, weight.n, rank)

    def part(x: Tensor, index: Tensor) -> Tensor:
        return dense_product(second, up, dense_product(first, down, x, index, None), index, None)

    return part


def _adding(base: Any, added: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> Any:
    """Return the module with the adapters' parts for one call, which other threads do not see."""
    if "forward" in base.__dict__:
        raise NotImplementedError(
            "QuantExperts: an adapter's part cannot be added to a forward that was replaced on the module; remove the "
            "hooks of accelerate, or merge the adapter"
        )
    twin = base.__class__.__new__(base.__class__)
    twin.__dict__ = base.__dict__ | {"added": added}
    return twin


def _checksum(packed: Tensor) -> int:
    return 0 if packed.is_meta else zlib.crc32(bytes_of(packed.detach().cpu().contiguous()))
