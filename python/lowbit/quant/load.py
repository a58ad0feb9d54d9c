# SPDX-License-Identifier: Apache-2.0
"""load: load the state dict of a quantized model into a float model, whose layers become packed layers.

No configuration is needed: the `layout` tensor next to a packed weight describes its bytes, and the block indices next
to a float weight describe its blocks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lowbit import _C
from lowbit.formats.spec import StoredWeight, size_text
from lowbit.quant.block_sparse import INDICES, Blocks, BlockSparseLinear, blocks_problem, hold_blocks
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.free_memory import available_bytes
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
from lowbit.quant.mapped_file import mapped_bytes
from lowbit.quant.permuted_linear import PERMUTATION, hold_permutation, permutation_problem
from lowbit.quant.quant_experts import EXPERTS
from lowbit.quant.quant_linear import LINEAR
from lowbit.quant.read_state import read_state
from lowbit.tables.folding import LayerNames, first_five

RENAMINGS: list[Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]] = []
"""Functions that rename the tensors of a file from older names to those of the model. Each integration of a library
adds its own."""
FOLDER_READERS: list[Callable[[nn.Module, Path], dict[str, Tensor] | None]] = []
"""Functions that return the state dict of a folder whose weights another package quantized, and None for others."""


def load(model: nn.Module, file: str | Path | Mapping[str, Tensor], *, mmap: bool | None = None) -> LayerNames:
    """Load the state dict of a quantized model into ``model``, in place; its layers become packed layers.

    The parameters of the model become the file's tensors, and layers that share a weight still share it. If the model
    is built on the meta device, no weight is allocated twice.

    Args:
        model: the float model, or a model that is quantized in the same way, on the cpu or the meta device.
        file: a ``.safetensors`` file, a file written by ``torch.save(model.state_dict())``, a folder written by
            ``save_pretrained``, or a state dict. For a model of transformers also a folder whose config.json names
            another package's quantization method, such as GPTQ: its codes are packed as they are
            (docs/checkpoints.md).
        mmap: True maps the file into memory: pages are read when they are used, can be evicted, and are shared with
            other processes that map it, but the file must not change while the model exists. False reads it into
            memory. None maps only ``.safetensors`` files. If the mapped weights do not fit into the free memory, this
            is printed, and packed experts are read ahead when the router has chosen them.

    Returns:
        A list of the names of the layers that became QuantLinear, QuantEmbedding, QuantExperts or BlockSparseLinear.
        Printed, it has one line for layers of the same kind.

    Raises:
        FileNotFoundError: the file does not exist, or the folder has no such file.
        ValueError: the file is damaged or of another type, names are missing or not in the model, a tensor has another
            shape than the model's, or a packed weight does not fit its layer; all this is checked before the model is
            changed. Also if a non-persistent buffer, which no file holds, would stay on the meta device.

    Example:
        >>> torch.save(quantized.state_dict(), "model.pt")
        >>> lowbit.load(build_model(), "model.pt")
    """
    if isinstance(file, Mapping):
        return _load(model, dict(file))
    path = Path(file)
    read = (reader(model, path) for reader in (FOLDER_READERS if path.is_dir() else ()))
    state = next((found for found in read if found is not None), None)
    state = read_state(path, mmap) if state is None else state
    try:
        turned = _load(model, state)
    except ValueError as error:
        raise ValueError(f"{error}, in {file}") from error
    _tell_if_larger_than_memory(model)
    return turned


def _tell_if_larger_than_memory(model: nn.Module) -> None:
    """If the mapped weights of a model do not fit into the free memory, say so, and let its experts be read ahead."""
    mapped, free = mapped_bytes([*model.parameters(), *model.buffers()]), available_bytes()
    if mapped <= free:
        return
    experts = [module for module in model.modules() if kind_of(module) is EXPERTS and is_packed(module)]
    for module in experts:
        module.__dict__["reads_ahead"] = True
    when = (
        "experts as soon as the router has chosen them, and all else when it is used" if experts else "when it is used"
    )
    print(
        f"load: {mapped / 1e9:.1f} GB of weights are mapped and {free / 1e9:.1f} GB of memory are free: what does not "
        f"fit is read from disk again and again, {when}",
        file=sys.stderr,
        flush=True,
    )


def _load(model: nn.Module, state: dict[str, Tensor]) -> LayerNames:
    known, beside = _names_of(model)
    for rename in () if state.keys() <= known | beside else RENAMINGS:
        state = rename(model, state)
    shared = _shared_names(model)
    state |= {first: state[other] for other, first in shared.items() if first not in state and other in state}
    state |= {other: state[first] for other, first in shared.items() if other not in state and first in state}
    _check_names(state, known, beside)
    packed, sparse = [*stored_weights(model, state)], dict(sparse_layers(model, state))
    checked = {f"{_prefix(name)}{weight.key}" for name, _, weight, _ in packed}
    _check_shapes(model, state, beside | checked | {weight_in(name) for name in sparse})
    sharing: dict[int, list[nn.Module]] = defaultdict(list)
    for _, module, weight, _ in packed:
        sharing[id(module._parameters[weight.key])].append(module)
    layouts = [_layout_in_memory(stored, sharing[id(of._parameters[weight.key])]) for _, of, weight, stored in packed]
    turned = LayerNames(dict.fromkeys(name for name, module, *_ in packed if not is_packed(module)))
    with changing_layers(model):
        for (name, module, weight, stored), layout in zip(packed, layouts, strict=True):
            hold_unset(module, weight, stored.in_layout(layout), state.get(f"{_prefix(name)}{PERMUTATION}"))
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
    """Return the layout of the kernels; for a weight that only embeddings have, the layout of the file."""
    return stored.layout if layout_of_all(layers) != _C.LAYOUT else _C.LAYOUT


def hold_unset(module: nn.Module, weight: LayerWeight, stored: StoredWeight, permutation: Tensor | None = None) -> None:
    """Give a layer a packed weight without values, to load a file into, and a buffer for the permutation of its inputs
    if the file has one. A layer that is packed already, since it is known under two names, stays as it is."""
    if not is_packed_value(module._parameters[weight.key]):
        unset = nn.Parameter(torch.empty(stored.shape, dtype=torch.uint8, device="meta"), requires_grad=False)
        kind_of(module).hold(module, weight.key, unset, stored)
    if permutation is not None:
        hold_permutation(module, torch.empty_like(permutation, device="meta"))


def stored_weights(
    model: nn.Module, state: Mapping[str, Tensor]
) -> Iterator[tuple[str, nn.Module, LayerWeight, StoredWeight]]:
    """Yield the name of the layer, the layer, the weight and its stored form for each packed weight in the state dict.

    Only the layout tensors need values; the weights may be on the meta device.

    Raises:
        ValueError: a packed weight does not fit its layer.
    """
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
        permutation = state.get(f"{_prefix(name)}{PERMUTATION}")
        if permutation is not None:
            problem = permutation_problem(permutation, weight.k)
            if problem is None and kind is not LINEAR:
                problem = f"beside the weight of a linear layer, got that of {type(module).__name__}"
            if problem:
                raise ValueError(f"load: {_prefix(name)}{PERMUTATION} must be {problem}")
        yield name, module, weight, stored


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def sparse_layers(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[nn.Module, Blocks]]]:
    """Yield name, layer and blocks of each linear layer whose weight the state dict stores as blocks.

    Raises:
        ValueError: the blocks do not fit the layer.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = _prefix(name)
        if kind_of(module) is not LINEAR or f"{prefix}{INDICES[0]}" not in state:
            continue
        if problem := blocks_problem(state, prefix, *features_of(module)):
            raise ValueError(f"load: {problem}")
        yield name, (module, Blocks(state[weight_in(name)], *(state[f"{prefix}{part}"] for part in INDICES)))


def _shared_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each shared parameter, by its other names.

    A safetensors file holds only one of the names: the first, if transformers wrote it; the alphabetically first, if
    safetensors' ``save_model`` did.
    """
    first: dict[int, str] = {}
    shared = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            shared[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return shared


def _names_of(model: nn.Module) -> tuple[set[str], set[str]]:
    """Return the names in the model's state dict, and the additional names that a file may have for packed weights and
    blocks."""
    beside = set()
    for key, layer, *_ in named_weights(model):
        beside |= {layout_name(key), *(f"{_prefix(layer)}{part}" for part in (*INDICES, PERMUTATION))}
    return set(model.state_dict(keep_vars=True)), beside


def _check_names(state: Mapping[str, Tensor], known: set[str], beside: set[str]) -> None:
    missing, unexpected = sorted(known - state.keys()), sorted(state.keys() - known - beside)
    if missing or unexpected:
        raise ValueError(
            f"load: names must be those of the model, missing {first_five(missing)}, "
            f"unexpected {first_five(unexpected)}"
        )


def _check_shapes(model: nn.Module, state: Mapping[str, Tensor], checked: set[str]) -> None:
    """Raise ValueError unless the tensors that are loaded as they are have the shapes of the model's. torch would find
    out after layers have become packed ones. Names in ``checked``, and modules that load in a way of their own, are not
    looked at."""
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:
            continue
        for key, held in (module._parameters | module._buffers).items():
            name = f"{_prefix(path)}{key}"
            given = None if name in checked or is_lazy(held) else state.get(name)
            if held is None or given is None or held.shape == given.shape:
                continue
            if held.dim() or given.shape != (1,):  # torch makes a number of such a tensor of an early version
                raise ValueError(f"load: {name} must have shape {list(held.shape)}, got {list(given.shape)}")


def _share_again(model: nn.Module, shared: Mapping[str, str]) -> None:
    """Tie shared parameters again, since loading gives each name its own parameter, unless the file has different
    weights under these names."""
    for other, first in shared.items():
        (to, key), (of, first_key) = _owner(model, other), _owner(model, first)
        mine, theirs = to._parameters[key], of._parameters[first_key]
        if mine.dtype == theirs.dtype and torch.equal(mine, theirs):
            to._parameters[key] = theirs


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _filled_by_parents(model: nn.Module, names: list[str], initialize: Callable[[nn.Module], None]) -> list[str]:
    """Initialize non-persistent buffers of modules with parameters, which a model fills when it initializes a module
    around them (the factors of Falcon-H1), and return the names of those that stay without values."""
    places = {name: _owner(model, name) for name in names}
    for module, key in places.values():
        if module._buffers[key].is_floating_point():
            module._buffers[key] = torch.full_like(module._buffers[key], torch.nan, device="cpu")
    around = {name.rsplit(".", depth)[0] for name in names for depth in range(2, name.count(".") + 1)} | {""}
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter._is_hf_initialized = True  # transformers leaves such values alone
    for path in sorted(around):
        if not (parent := model.get_submodule(path))._parameters:
            initialize(parent)
    for parameter in parameters:
        del parameter._is_hf_initialized
    values = {name: module._buffers[key] for name, (module, key) in places.items()}
    return [name for name, value in values.items() if value.is_meta or value.isnan().any()]


def _fill_buffers(model: nn.Module) -> None:
    """Initialize non-persistent buffers, such as tables of rotary embeddings, that are still on the meta device.

    Raises:
        ValueError: some buffers cannot be initialized; the message names them.
    """
    initialize = getattr(model, "_init_weights", None)  # transformers' models initialize such modules in this method
    left = []
    for prefix, module in model.named_modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if names and initialize is not None and not module._parameters:
            module.to_empty(device="cpu", recurse=False)
            floats = [name for name in names if module._buffers[name].is_floating_point()]
            for name in floats:
                module._buffers[name].fill_(torch.nan)  # marks elements that _init_weights does not fill
            initialize(module)
            names = [name for name in names if name not in floats or module._buffers[name].isnan().any()]
        left += [f"{prefix}.{name}" if prefix else name for name in names]
    if left and initialize is not None:
        left = _filled_by_parents(model, left, initialize)
    if left:
        raise ValueError(
            f"load: {first_five(sorted(left))} must have values, which no file holds, got the meta device; "
            "build the model on the cpu"
        )
