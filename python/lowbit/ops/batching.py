# SPDX-License-Identifier: Apache-2.0
"""vmap over the attention ops: one call if the mapped dimension can be merged into the batch, otherwise one call per
entry. torch's own fallback makes one call per entry too, but does not support lists of tensors.

torch has two vmaps. `torch.vmap` and torch.func use the rule of `register_vmap`.
`torch.autograd.grad(is_grads_batched=True)`, `jacobian(vectorize=True)` and the batched checks of gradcheck still use
an older one, with the dispatch key Batched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lowbit.ops.registration import argument_names, keep


def register(name: str) -> None:
    """Register rules of both vmaps for both overloads of ``lowbit::name`` (see derivatives.py), unless another copy of
    the package has done so."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"lowbit::{name}", "FuncTorchBatched"):
        return
    library = keep(torch.library.Library("lowbit", "FRAGMENT"))
    names, packet = argument_names(name), getattr(torch.ops.lowbit, name)
    _register(name, packet.default, names, library)
    _register(f"{name}.detached", packet.detached, names, library)


def _register(entry: str, op: Callable[..., Any], names: list[str], library: torch.library.Library) -> None:

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        stacked = _folded(
            op, info.batch_size, dict(zip(names, arguments, strict=False)), dict(zip(names, in_dims, strict=False))
        )
        if stacked is None:
            stacked = _stack(op, info.batch_size, lambda i: _entry(arguments, in_dims, i))
        return stacked, type(stacked)(0 for _ in stacked)

    def older_rule(*arguments: Any) -> Any:
        level = torch._C._vmapmode_decrement_nesting() + 1  # inner calls belong to the enclosing vmap
        try:
            whole = tree_map_only(
                Tensor, lambda tensor: torch._remove_batch_dim(tensor, level, 1, 0), arguments
            )  # a tensor without the mapped dimension gets one of size 1
            sizes: list[int] = []
            tree_map_only(Tensor, lambda tensor: sizes.append(tensor.shape[0]), whole)
            stacked = _stack(
                op,
                max(sizes),
                lambda i: tree_map_only(Tensor, lambda tensor: tensor[min(i, tensor.shape[0] - 1)], whole),
            )
            return tree_map_only(Tensor, lambda tensor: torch._add_batch_dim(tensor, 0, level), stacked)
        finally:
            torch._C._vmapmode_increment_nesting()

    torch.library.register_vmap(f"lowbit::{entry}", rule, lib=library)
    library.impl(entry, older_rule, "Batched")


def _folded(op: Callable[..., Any], count: int, call: dict[str, Any], dims: dict[str, Any]) -> Any:
    """Return the results of one call with the mapped dimension merged into the batch, or None if that is impossible.

    All tensors ``[B, ...]`` must be mapped; so must a mask, unless its B is 1. Merging is impossible for programs,
    blocks and dropout, which depend on the batch index, and for the gradients of a sink and of an unmapped mask, which
    are sums over the batch.
    """
    rows = [name for name in ("q", "k", "v", "out", "lse", "grad_out", "grad_lse") if call.get(name) is not None]
    if any(dims[name] is None for name in rows) or dims["sink"] is not None or call.get("sink_needs"):
        return None
    if call["score_mod"] or call["mask_mod"] or call["blocks"] or call["dropout_p"] > 0:
        return None
    if dims["mask"] is not None:
        rows.append("mask")
    elif call["mask"] is not None and (call["mask"].shape[0] != 1 or call.get("mask_needs")):
        return None
    mapped = {name: call[name].movedim(dims[name], 0) for name in rows}
    batch = mapped["q"].shape[1]
    if "mask" in mapped and mapped["mask"].shape[1] != batch:
        return None
    results = op(*(call | {name: tensor.flatten(0, 1) for name, tensor in mapped.items()}).values())
    return type(results)(x.unflatten(0, (count, batch)) if x.dim() > 1 else x.new_empty((count, 0)) for x in results)


def _stack(op: Callable[..., Any], count: int, arguments: Callable[[int], Any]) -> Any:
    """Return the stacked results of one call per entry, as a list or a tuple, like the results of the op."""
    results = [op(*arguments(i)) for i in range(count)]
    return type(results[0])(torch.stack(parts) for parts in zip(*results, strict=True))


def _entry(argument: Any, dim: Any, i: int) -> Any:
    """Return a tree of arguments with entry i of every batched tensor."""
    if isinstance(argument, (tuple, list)) and dim is not None:
        return type(argument)(_entry(item, item_dim, i) for item, item_dim in zip(argument, dim, strict=True))
    return argument.select(dim, i) if isinstance(argument, Tensor) and dim is not None else argument
