# SPDX-License-Identifier: Apache-2.0
"""lowbit.compile_blocks: the repeated block of a model is compiled once for all layers.

Blocks of one structure have one graph because parameters are inputs of it. Other differences are kept out: no forward
of ours reads a name or an address, and the index of a layer, by which transformers finds its part of a cache, is looked
up before the graph begins.

`torch.compiler.nested_compile_region` would enter one graph in a call and not one for each block, 0.1 ms each. In torch
2.13 it gives each block the parameters of the first where a method is marked on an object, without an error.
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

    A block is an entry of an ``nn.ModuleList`` or ``nn.Sequential`` that has at least one other of its class and
    structure (names, classes, shapes and dtypes) beside it; blocks within blocks are part of these. Nothing is compiled
    before the first call. A cache of transformers, and a ``lowbit.QuantizedKVCache`` of which a block gets its
    ``layer(i)``, are written in place and make no graph of their own for a layer.

    Args:
        model: any module.
        options: arguments of ``torch.compile`` (``options=lowbit.compile_options()``, ``dynamic``, ``fullgraph``, ...).

    Returns:
        Names of the blocks, a list that prints as one line for those of a kind.

    Raises:
        TypeError: model is no module.
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
    """The outermost blocks of ``model`` that have another of their structure beside them, by name."""
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
    """The call of a block, its forward and hooks, as `nn.Module.compile` makes it; with its own layer of the cache
    where it says which that is."""
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
