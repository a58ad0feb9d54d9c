# SPDX-License-Identifier: Apache-2.0
"""lowbit.compile_blocks: compile the repeated block of a model once for all layers.

Blocks with the same structure share a graph, because parameters are inputs of it. Other differences are kept out of the
graph: no forward of lowbit reads a name or an address, and the layer index, by which transformers finds a layer's part
of a cache, is looked up before the graph begins.

`torch.compiler.nested_compile_region` would enter one graph per call instead of one per block. It is not used, because
torch 2.13 silently gives each block the parameters of the first if a bound method is marked.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.tables.folding import LayerNames


def compile_blocks(model: nn.Module, **options: Any) -> LayerNames:
    """Compile the blocks that a model repeats, in place, as one graph for all of them.

    A block is an entry of an ``nn.ModuleList`` or ``nn.Sequential`` with at least one other entry of its class and
    structure (names, classes, shapes and dtypes); blocks within blocks are compiled as part of these. Compilation
    starts with the first call. A transformers cache, or a ``lowbit.QuantizedKVCache`` whose ``layer(i)`` is passed to
    each block, is written in place and does not cause a separate graph per layer.

    Args:
        model: any module.
        options: arguments of ``torch.compile`` (``options=lowbit.compile_options()``, ``dynamic``, ``fullgraph``, ...).

    Returns:
        The names of the blocks, in a list that prints one line per kind.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: no block of the model is repeated.

    Example:
        >>> lowbit.compile_blocks(model, options=lowbit.compile_options())
        model.layers.* x 30
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile_blocks: model must be a torch.nn.Module, got {type(model).__name__}")
    blocks = _repeated(model)
    if not blocks:
        raise ValueError(
            "compile_blocks: model must have two blocks of one class and structure in an nn.ModuleList or "
            f"nn.Sequential, got {type(model).__name__} without"
        )
    for block in blocks.values():
        block._compiled_call_impl = _compiled(block, options)
    return LayerNames(blocks)


def _repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Return by name the outermost blocks of ``model`` that have another of the same structure in their list."""
    found: dict[str, nn.Module] = {}
    for name, parent in model.named_modules():
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)) or any(
            name.startswith(f"{block}.") for block in found
        ):
            continue
        alike: dict[Hashable, dict[str, nn.Module]] = defaultdict(dict)
        for index, child in enumerate(parent):
            if any(True for _ in child.parameters()):
                alike[_structure(child)][f"{name}.{index}" if name else str(index)] = child
        for blocks in alike.values():
            found |= blocks if len(blocks) > 1 else {}
    return found


def _structure(block: nn.Module) -> Hashable:
    def of(tensor: Tensor | None) -> Hashable:
        return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)

    return tuple(
        (
            name,
            type(module),
            *((key, of(x)) for x_of in (module._parameters, module._buffers) for key, x in x_of.items()),
        )
        for name, module in block.named_modules()
    )


def _compiled(block: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    """Return the compiled call of a block (its forward and hooks), as `nn.Module.compile` makes it. If the block has a
    layer index, the call gets only its own layer of the cache."""
    call = torch.compile(block._call_impl, **options)
    indices = {module.layer_idx for module in block.modules() if isinstance(getattr(module, "layer_idx", None), int)}
    if len(indices) != 1:
        return call
    (index,) = indices

    def with_own_cache(*args: Any, **kwargs: Any) -> Any:
        if "transformers" in sys.modules and kwargs.get("past_key_values") is not None:
            from lowbit.models.cache_layer import with_cache_of_layer

            kwargs = with_cache_of_layer(kwargs, index)
        return call(*args, **kwargs)

    return with_own_cache
