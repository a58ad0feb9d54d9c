# SPDX-License-Identifier: Apache-2.0
"""vmap over the attention ops: one call where the mapped dimension can join the batch, else one call per entry. torch's
own fallback, which does the latter, takes no lists of tensors.

torch has two vmaps. `torch.vmap` and torch.func ask a rule of `register_vmap`.
`torch.autograd.grad(is_grads_batched=True)`,
`jacobian(vectorize=True)` and the batched part of gradcheck still use an older one, under the dispatch key Batched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lowbit.ops.registration import argument_names, keep


def register(name: str) -> None:
    """Give both entries of ``lowbit::name`` (derivatives.py) rules for both, unless another copy of the package did."""
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
        level = torch._C._vmapmode_decrement_nesting() + 1  # calls from here belong to the vmap around this one
        try:
            whole = tree_map_only(
                Tensor, lambda tensor: torch._remove_batch_dim(tensor, level, 1, 0), arguments
            )  # 1: if it has no such dimension
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
    """The results of one call with the mapped dimension as part of the batch; None where it cannot join.

    All tensors of ``[B, ...]`` have to be mapped, a mask too unless its B is 1. Programs, blocks and dropout count
    batches; the gradients of a sink, and of a mask that is not mapped, are sums over the batch.
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
    """The results of one call per entry, stacked one by one; a list or a tuple, as the op returns."""
    results = [op(*arguments(i)) for i in range(count)]
    return type(results[0])(torch.stack(parts) for parts in zip(*results, strict=True))


def _entry(argument: Any, dim: Any, i: int) -> Any:
    """Entry i of everything that is batched in a tree of arguments."""
    if isinstance(argument, (tuple, list)) and dim is not None:
        return type(argument)(_entry(item, item_dim, i) for item, item_dim in zip(argument, dim, strict=True))
    return argument.select(dim, i) if isinstance(argument, Tensor) and dim is not None else argument
