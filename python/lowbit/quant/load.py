# SPDX-License-Identifier: Apache-2.0
"""load: the weights of a quantized model from a file into a float model, whose layers become those of the file.

The numbers beside a packed weight, `layout`, give the meaning of its bytes, and indices make blocks of a float one: the
file needs no configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lowbit import _C
from lowbit.formats.spec import StoredWeight
from lowbit.quant.adapters import adopt_lora_layers
from lowbit.quant.block_sparse import INDICES, Blocks, BlockSparseLinear, blocks_problem, hold_blocks
from lowbit.quant.changing_layers import changing_layers
from lowbit.quant.fast_path import disable_encoder_fast_path
from lowbit.quant.layout import numbers_of
from lowbit.quant.linear_layers import features_of, is_embedding, is_linear, is_scaled_embedding
from lowbit.quant.load_check import check_state_dicts_of
from lowbit.quant.quant_embedding import QuantEmbedding, quantize_embedding_in_place
from lowbit.quant.quant_linear import QuantLinear, quantize_in_place
from lowbit.quant.read_state import read_state
from lowbit.tables.folding import LayerNames, first_five

PACKED = (QuantLinear, QuantEmbedding)
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
        Names of the layers that were turned into QuantLinear, QuantEmbedding and BlockSparseLinear, a list; it prints
        one line for those of a kind.

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
    for rename in RENAMINGS:
        state = rename(model, state)
    shared = _shared_names(model)
    state |= {first: state[other] for other, first in shared.items() if first not in state and other in state}
    state |= {other: state[first] for other, first in shared.items() if other not in state and first in state}
    _check_names(model, state)
    packed, sparse = dict(packed_layers(model, state)), dict(sparse_layers(model, state))
    turned = LayerNames(name for name, (module, _) in packed.items() if not isinstance(module, PACKED))
    of_linear = {id(module.weight) for module, _ in packed.values() if is_linear(module)}
    with changing_layers(model):
        for name in turned:
            module, stored = packed[name]
            if not isinstance(module, PACKED):  # one layer may have two names
                alone = is_embedding(module) and id(module.weight) not in of_linear
                layout = stored.layout if alone else _C.LAYOUT
                shape = stored.spec.shape(stored.n, stored.k, layout)
                weight = nn.Parameter(torch.empty(shape, dtype=torch.uint8, device="meta"), requires_grad=False)
                if is_embedding(module):
                    quantize_embedding_in_place(module, weight, stored.spec, layout)
                else:
                    quantize_in_place(module, weight, stored.spec)
        for name, (module, blocks) in sparse.items():
            if not isinstance(module, BlockSparseLinear):
                turned.append(name)
            hold_blocks(module, nn.Parameter(blocks.values, requires_grad=module.weight.requires_grad), blocks)
        model.load_state_dict(state, assign=True)
        _share_again(model, shared)
    _fill_buffers(model)
    disable_encoder_fast_path(model)
    check_state_dicts_of(model)
    adopt_lora_layers(model)
    return turned


def packed_layers(
    model: nn.Module, state: Mapping[str, Tensor]
) -> Iterator[tuple[str, tuple[nn.Module, StoredWeight]]]:
    """Yield the layers whose packed weight the state dict holds, with its numbers; one that it cannot serve is refused.
    Only the layouts have to hold values."""
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        weight, layout = state.get(f"{prefix}weight"), state.get(f"{prefix}layout")
        if (
            weight is None
            or f"{prefix}{INDICES[0]}" in state
            or not (is_linear(module) or type(module) in (nn.Embedding, QuantEmbedding) or is_scaled_embedding(module))
            or (layout is None and weight.is_floating_point() and not isinstance(module, PACKED))
        ):
            continue
        n, k = features_of(module)
        wanted = f"load: {prefix}weight must be a packed weight of n={n} k={k} with its layout"
        got = f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
        if layout is None or weight.dtype != torch.uint8:
            raise ValueError(f"{wanted}, got {got} {'without one' if layout is None else 'and one'}")
        try:
            stored = numbers_of(layout)
        except ValueError as error:
            raise ValueError(f"{wanted}, got {got} as {error}") from None
        if (stored.n, stored.k) != (n, k) or tuple(weight.shape) != stored.shape:
            raise ValueError(f"{wanted}, got {got} as {stored}")
        if isinstance(module, PACKED) and module.spec.layout(n, k) != stored.spec.layout(n, k):
            raise ValueError(
                f"load: {name} is quantized as {module.spec.name}, got {stored}; load into the float model"
            )
        yield name, (module, stored)


def sparse_layers(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[nn.Module, Blocks]]]:
    """Yield the linear layers of whose weight the state dict holds blocks."""
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if not is_linear(module) or f"{prefix}{INDICES[0]}" not in state:
            continue
        if problem := blocks_problem(state, prefix, *features_of(module)):
            raise ValueError(f"load: {problem}")
        yield name, (module, Blocks(*(state[f"{prefix}{part}"] for part in ("weight", *INDICES))))


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


def _check_names(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    known = set(model.state_dict(keep_vars=True))
    ours = {
        f"{name}.{part}" if name else part
        for name, module in model.named_modules(remove_duplicate=False)
        if is_linear(module) or is_embedding(module)
        for part in ("layout", *INDICES)
    }
    missing, unexpected = sorted(known - state.keys()), sorted(state.keys() - known - ours)
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
    initialize = getattr(model, "_init_weights", None)  # of transformers' models: fills such modules
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
