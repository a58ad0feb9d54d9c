# SPDX-License-Identifier: Apache-2.0
"""load: the weights of a quantized model from a file into a float model, whose layers become those of the file.

The numbers beside a packed weight, `layout`, give the meaning of its bytes, and indices make blocks of a float one: the
file needs no configuration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lowbit import _C
from lowbit.formats.spec import StoredWeight, size_text
from lowbit.quant.block_sparse import INDICES, Blocks, BlockSparseLinear, blocks_problem, hold_blocks
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.kinds import (
    LayerWeight,
    features_of,
    is_packed,
    is_packed_value,
    kind_of,
    layout_name,
    layout_of_all,
    named_weights,
    weight_in,
)
from lowbit.quant.layout import numbers_of
from lowbit.quant.load_check import guard
from lowbit.quant.quant_linear import LINEAR
from lowbit.quant.read_state import read_state
from lowbit.tables.folding import LayerNames, first_five

RENAMINGS: list[Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]] = []
"""Functions that rename the tensors of a file to the names of a model, where its library knows older ones: added by the
integration of that library."""


def load(model: nn.Module, file: str | Path | Mapping[str, Tensor], *, mmap: bool | None = None) -> LayerNames:
    """Load the state dict of a quantized model into ``model``, in place; its linear layers become those of the file.

    ``model`` may be built on the meta device: then nothing is allocated twice. Its parameters become the file's
    tensors; layers that share a weight share it again.

    Args:
        model: the float model (or one that is quantized in the same way), on the cpu or the meta device.
        file: a ``.safetensors`` file, a file of ``torch.save(model.state_dict())``, a folder that ``save_pretrained``
            wrote, or a state dict.
        mmap: True maps the file: pages are read as they are used, and can leave memory again, but the file must stay
            as it is while the model lives. False reads it into memory. None maps ``.safetensors`` files alone.

    Returns:
        Names of the layers that were turned into QuantLinear, QuantEmbedding, QuantExperts and BlockSparseLinear, a
        list; it prints one line for those of a kind.

    Raises:
        FileNotFoundError: there is no such file, or none in the folder.
        ValueError: the file is another or damaged, names are missing or not the model's, or a packed weight does not
            fit its layer: checked before the model is changed. Or a buffer that no file holds (not persistent) would
            stay on the meta device.

    Example:
        >>> torch.save(quantized.state_dict(), "model.pt")
        >>> lowbit.load(build_model(), "model.pt")
    """
    if isinstance(file, Mapping):
        return _load(model, dict(file))
    state = read_state(Path(file), mmap)
    try:
        return _load(model, state)
    except ValueError as error:
        raise ValueError(f"{error}, in {file}") from error


def _load(model: nn.Module, state: dict[str, Tensor]) -> LayerNames:
    known, beside = _names_of(model)
    for rename in () if state.keys() <= known | beside else RENAMINGS:
        state = rename(model, state)
    shared = _shared_names(model)
    state |= {first: state[other] for other, first in shared.items() if first not in state and other in state}
    state |= {other: state[first] for other, first in shared.items() if other not in state and first in state}
    _check_names(state, known, beside)
    packed, sparse = [*stored_weights(model, state)], dict(sparse_layers(model, state))
    sharing: dict[int, list[nn.Module]] = defaultdict(list)
    for _, module, weight, _ in packed:
        sharing[id(module._parameters[weight.key])].append(module)
    layouts = [_layout_in_memory(stored, sharing[id(of._parameters[weight.key])]) for _, of, weight, stored in packed]
    turned = LayerNames(dict.fromkeys(name for name, module, *_ in packed if not is_packed(module)))
    with changing_layers(model):
        for (_, module, weight, stored), layout in zip(packed, layouts, strict=True):
            hold_unset(module, weight, stored.in_layout(layout))
        for name, (module, blocks) in sparse.items():
            if not isinstance(module, BlockSparseLinear):
                turned.append(name)
            hold_blocks(module, nn.Parameter(blocks.values, requires_grad=module.weight.requires_grad), blocks)
        model.load_state_dict(state, assign=True)
        _share_again(model, shared)
    _fill_buffers(model)
    guard(model)
    return turned


def _layout_in_memory(stored: StoredWeight, layers: list[nn.Module]) -> str:
    """That of the kernels; of tables alone that of the file."""
    return stored.layout if layout_of_all(layers) != _C.LAYOUT else _C.LAYOUT


def hold_unset(module: nn.Module, weight: LayerWeight, stored: StoredWeight) -> None:
    """Give a layer a packed weight without values, for those of a file, unless it is packed: it may have two names."""
    if not is_packed_value(module._parameters[weight.key]):
        unset = nn.Parameter(torch.empty(stored.shape, dtype=torch.uint8, device="meta"), requires_grad=False)
        kind_of(module).hold(module, weight.key, unset, stored)


def stored_weights(
    model: nn.Module, state: Mapping[str, Tensor]
) -> Iterator[tuple[str, nn.Module, LayerWeight, StoredWeight]]:
    """Yield name, layer and weight of the packed weights that the state dict holds, and how it holds them; one that
    does not fit its layer is refused. Only the layouts have to hold values."""
    for key, name, module, weight in named_weights(model):
        packed, layout = state.get(key), state.get(layout_name(key))
        kind, ours = kind_of(module), is_packed_value(module._parameters[weight.key])
        if (
            packed is None
            or f"{_prefix(name)}{INDICES[0]}" in state
            or not (ours or kind.can_hold(module))
            or (layout is None and packed.is_floating_point() and not ours)
        ):
            continue
        size = size_text(weight.n, weight.k, weight.experts)
        wanted = f"load: {key} must be a packed weight of {size} with its layout"
        got = f"{str(packed.dtype).removeprefix('torch.')} {list(packed.shape)}"
        if layout is None or packed.dtype != torch.uint8:
            raise ValueError(f"{wanted}, got {got} {'without one' if layout is None else 'and one'}")
        try:
            stored = numbers_of(layout)
        except ValueError as error:
            raise ValueError(f"{wanted}, got {got} as {error}") from None
        if not stored.is_as(weight.stored(stored.spec)) or tuple(packed.shape) != stored.shape:
            raise ValueError(f"{wanted}, got {got} as {stored}")
        if ours and not stored.is_as(weight.stored(kind.spec_of(module, weight))):
            spec = kind.spec_of(module, weight)
            raise ValueError(f"load: {name} is quantized as {spec.name}, got {stored}; load into the float model")
        yield name, module, weight, stored


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def sparse_layers(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[nn.Module, Blocks]]]:
    """Yield the linear layers of whose weight the state dict holds blocks."""
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = _prefix(name)
        if kind_of(module) is not LINEAR or f"{prefix}{INDICES[0]}" not in state:
            continue
        if problem := blocks_problem(state, prefix, *features_of(module)):
            raise ValueError(f"load: {problem}")
        yield name, (module, Blocks(state[weight_in(name)], *(state[f"{prefix}{part}"] for part in INDICES)))


def _shared_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that has several, and its first: safetensors stores one of them, transformers
    the first and ``save_model`` of safetensors the least."""
    first: dict[int, str] = {}
    shared = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            shared[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return shared


def _names_of(model: nn.Module) -> tuple[set[str], set[str]]:
    """The names of a state dict of the model, and those that a file may have beside them for packed
    weights and blocks."""
    beside = set()
    for key, layer, *_ in named_weights(model):
        beside |= {layout_name(key), *(f"{_prefix(layer)}{part}" for part in INDICES)}
    return set(model.state_dict(keep_vars=True)), beside


def _check_names(state: Mapping[str, Tensor], known: set[str], beside: set[str]) -> None:
    missing, unexpected = sorted(known - state.keys()), sorted(state.keys() - known - beside)
    if missing or unexpected:
        raise ValueError(
            f"load: names must be those of the model, missing {first_five(missing)}, "
            f"unexpected {first_five(unexpected)}"
        )


def _share_again(model: nn.Module, shared: Mapping[str, str]) -> None:
    """Loading gives each name a parameter of its own; names of one get one again, unless the file holds two weights."""
    for other, first in shared.items():
        (to, key), (of, first_key) = _owner(model, other), _owner(model, first)
        mine, theirs = to._parameters[key], of._parameters[first_key]
        if mine.dtype == theirs.dtype and torch.equal(mine, theirs):
            to._parameters[key] = theirs


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _fill_buffers(model: nn.Module) -> None:
    """Make the buffers that no state dict holds (tables of rotary embeddings) where they are still on
    the meta device."""
    initialize = getattr(model, "_init_weights", None)  # a method of transformers' models that fills such modules
    left = []
    for prefix, module in model.named_modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if names and initialize is not None and not module._parameters:
            module.to_empty(device="cpu", recurse=False)
            floats = [name for name in names if module._buffers[name].is_floating_point()]
            for name in floats:
                module._buffers[name].fill_(torch.nan)  # its other elements were not filled
            initialize(module)
            names = [name for name in names if name not in floats or module._buffers[name].isnan().any()]
        left += [f"{prefix}.{name}" if prefix else name for name in names]
    if left:
        raise ValueError(
            f"load: {first_five(sorted(left))} would stay without values, no file holds them; "
            "build the model on the cpu"
        )
