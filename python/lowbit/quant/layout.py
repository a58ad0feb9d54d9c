# SPDX-License-Identifier: Apache-2.0
"""The layouts of a packed weight, and conversion between them: a file may use another layout than the kernels.

Codes, scales and zero points keep every bit. "row-major" is the exchange layout, in which rows of the weight are
independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import _C, devices
from lowbit.formats.semi_sparse import FORMAT as SEMI_SPARSE
from lowbit.formats.semi_sparse import fullest_four
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.ops.packed_weights import WAYS_TO_TRAIN
from lowbit.quant.kinds import LayerWeight, kind_of, layout_name, packed_weights, weight_name


def numbers_of(layout: Tensor) -> StoredWeight:
    """Read the ``layout`` tensor of a state dict.

    Raises:
        ValueError: it is not an int64 tensor, or its version, format or layout is unknown.
    """
    if layout.dtype != torch.int64:
        raise ValueError(f"a layout of {layout.dtype}, which must be torch.int64")
    return StoredWeight.read(layout.flatten().tolist())


def repack_weight(weight: Tensor, stored: StoredWeight, layout: str = _C.LAYOUT) -> Tensor:
    """Return the packed ``weight`` in another layout; the tensor itself if it already has that layout."""
    if stored.layout == layout:
        return weight
    spec, n, k = stored.spec, stored.n, stored.k
    if stored.experts is not None:
        one = StoredWeight(spec, n, k, stored.layout)
        return torch.stack([repack_weight(matrix, one, layout) for matrix in weight])
    source = weight.detach().contiguous()
    if not source.is_meta and not devices.places.has_rows("repack", source.device):
        source = source.cpu()
    out = source.new_empty(spec.shape(n, k, layout))
    if not source.is_meta:
        if spec.format == SEMI_SPARSE and stored.layout == "row-major":
            _check_semi_sparse(source[:, -k - -k % 16 :][:, :k])
        _C.repack(source, _C.LAYOUTS[stored.layout], out, _C.LAYOUTS[layout], *spec.weight_args(n, k))
    return out.to(weight.device)


def _check_semi_sparse(codes: Tensor) -> None:
    if full := fullest_four(codes, 128):
        row, column, count = full
        where = f"[{row}, {column}:{column + 4}]"
        raise ValueError(f"repack: codes of {SEMI_SPARSE} must be 2:4, got {count} of {where} that are not 128")


def repack(state_dict: Mapping[str, Any], layout: str = "row-major") -> dict[str, Any]:
    """Return a state dict with every packed weight in ``layout``; all other entries are the same tensors.

    Entries that share a tensor still share one. A state dict in any layout can be loaded on any machine: `load` and
    ``load_state_dict`` convert weights to the layout of the kernels.

    Args:
        state_dict: the state dict of a model with `QuantLinear` layers, in any layouts.
        layout: "row-major", for exchange, or "x86-panel-16x64".

    Raises:
        ValueError: ``layout`` is unknown, or a packed weight has an unknown version, layout or format.

    Example:
        >>> torch.save(lowbit.quant.repack(model.state_dict()), "model.pt")
    """
    if layout not in _C.LAYOUTS:
        raise ValueError(f"repack: layout must be one of {', '.join(_C.LAYOUTS)}, got layout={layout!r}")
    held = dict(state_dict)
    result, repacked = dict(held), dict[tuple[Any, ...], Tensor]()
    for key, numbers in held.items():
        name = weight_name(key)
        if name is None or not isinstance(numbers, Tensor):
            continue
        weight = held.get(name)  # None if the weight is tied to another layer's
        if weight is not None and weight.dtype != torch.uint8:
            continue
        try:
            stored = numbers_of(numbers)
        except ValueError as error:
            if weight is None:  # an unrelated tensor with a name that ends in "layout"
                continue
            raise ValueError(f"repack: {name} must be a packed weight, got {error}") from None
        result[key] = numbers.new_tensor(stored.in_layout(layout).numbers)
        if weight is not None:
            memory = weight.untyped_storage()._cdata, weight.storage_offset(), weight.stride()
            tied = memory, stored.spec.weight_args(stored.n, stored.k), stored.layout
            if tied not in repacked:
                repacked[tied] = repack_weight(weight, stored, layout)
            result[name] = repacked[tied]
    return result


class PackedModule(nn.Module):
    """Base class of the modules that hold packed weights. It checks a state dict and converts weights to the module's
    layout."""

    spec: LinearSpec
    """How the weight is stored; for several weights, the spec of the last one."""

    def requires_grad_(self, requires_grad: bool = True) -> PackedModule:
        """Freeze the bias, as ``requires_grad_(False)`` of nn.Module; a packed weight has no gradient.

        Raises:
            ValueError: ``requires_grad`` is True; names the layer, and the ways to train.
        """
        if requires_grad:
            raise ValueError(f"requires_grad_: {self} has a packed weight, which has no gradient; {WAYS_TO_TRAIN}")
        return super().requires_grad_(requires_grad)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, as nn.Module does.

        Raises:
            ValueError: `torch.nn.utils.prune` asks for it, which would replace a parameter by a masked one.
        """
        pruned = name.removesuffix("_orig")
        if pruned != name and pruned in self._parameters:
            raise ValueError(
                f"torch.nn.utils.prune: the layer must be float, got {pruned} of {self}; prune it and call prune.remove "
                "before quantize_ packs it, which keeps zeros (formats without a zero point), or call sparsify_"
            )
        super().register_parameter(name, param)

    def state_dict_problem(self, state_dict: Mapping[str, Any], prefix: str) -> str | None:
        """Return the reason why the entries of ``state_dict`` under ``prefix`` do not fit this layer, or None."""
        kind = kind_of(self)
        layout = kind.layout_of(self)
        held = ((weight, weight.stored(kind.spec_of(self, weight), layout)) for weight in packed_weights(self))
        return next((text for each in held if (text := _problem(state_dict, prefix, *each))), None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        problem = self.state_dict_problem(state_dict, prefix)
        if problem:
            raise ValueError(f"load_state_dict: {problem}")
        kind = kind_of(self)
        for weight in packed_weights(self):
            state_dict = in_layout(state_dict, f"{prefix}{weight.key}", kind.layout_of(self))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _problem(state_dict: Mapping[str, Any], prefix: str, weight: LayerWeight, held: StoredWeight) -> str | None:
    """Return the reason why the entries under ``prefix``, in any layout, do not fit the packed weight of a layer, or
    None. If the numbers are on the meta device, the layout of the layer is assumed."""
    name = f"{prefix}{weight.key}"
    value, numbers = state_dict.get(name), state_dict.get(layout_name(name))
    wanted = f"{name} must be packed as {held.in_layout(_C.LAYOUT)}"
    if isinstance(value, Tensor) and value.dtype != torch.uint8:
        return f"{wanted}, got {text_of(value)}"
    if isinstance(value, Tensor) and numbers is None:
        return f"{wanted}, got {text_of(value)} without {layout_name(name)}"
    if isinstance(numbers, Tensor) and numbers.device.type != "meta":
        try:
            stored = numbers_of(numbers)
        except ValueError as error:
            return f"{wanted}, got {error}"
        if not stored.is_as(held):
            return f"{wanted}, got {stored}"
        if isinstance(value, Tensor) and tuple(value.shape) != stored.shape:
            return f"{wanted}: shape {list(stored.shape)}, got {text_of(value)}"
    elif isinstance(value, Tensor) and tuple(value.shape) != held.shape:
        return f"{wanted}: shape {list(held.shape)}, got {text_of(value)}"
    return None


def text_of(tensor: Tensor) -> str:
    """Return dtype and shape as text for error messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def in_layout(state_dict: dict[str, Any], name: str, layout: str = _C.LAYOUT) -> dict[str, Any]:
    """Return the state dict with the weight ``name`` in this layout and the latest version, and contiguous. Returns the
    same dict if nothing changes."""
    weight, numbers = state_dict.get(name), state_dict.get(layout_name(name))
    if not isinstance(numbers, Tensor) or numbers.is_meta:
        return state_dict
    stored = numbers_of(numbers)
    wanted = stored.in_layout(layout)
    contiguous = not isinstance(weight, Tensor) or weight.is_contiguous()
    if stored.layout == layout and numbers.numel() == len(wanted.numbers) and contiguous:
        return state_dict
    changed = {layout_name(name): numbers.new_tensor(wanted.numbers)}
    if isinstance(weight, Tensor):
        changed[name] = repack_weight(weight, stored, layout).contiguous()
    return {**state_dict, **changed}
