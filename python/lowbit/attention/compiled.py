# SPDX-License-Identifier: Apache-2.0
"""flex_attention under torch.compile: torch's own higher-order op, with lowbit's kernels.

Dynamo supports `torch.ops.higher_order.flex_attention`: it turns the mods into subgraphs, and the tensors that they
capture into inputs. The functions registered here run in place of that op. They trace the subgraphs into score programs
and call `lowbit::attention_forward`, so nothing of the higher-order op is left after AOTAutograd. Calls that are not
lowbit's (those without `_LOWBIT` in the kernel options, unless `install` was called) go to torch's kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._higher_order_ops.flex_attention import flex_attention as flex_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from lowbit import devices
from lowbit.attention.run_mods import WHOLE, run_mods
from lowbit.ops.tracing import constant_in_graphs
from lowbit.score.tracer import Subgraph

_lock = threading.Lock()
_taken: list[bool] = []
_MARK = "_LOWBIT"  # kernel option of lowbit's calls, with dropout_p as its value
everything = False
"""Whether to run torch's flex_attention on CPU tensors too. `install` sets it."""


def compiled_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None, block_mask: BlockMask | None,
    scale: float,
    dropout_p: float = 0.0, sink: Tensor | None = None, want_max_scores: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Call the higher-order op with the arguments of `run_mods`, for Dynamo to trace."""
    take_flex_op()
    for tensor in (query, key, value):  # head count and head dimension decide the kernel, as in torch
        torch._dynamo.mark_static(tensor, -3)
        torch._dynamo.mark_static(tensor, -1)
    mask = _everything(query) if block_mask is None else block_mask
    options = {_MARK: dropout_p, "OUTPUT_MAX": want_max_scores}
    out, lse, max_scores = flex_op(
        query, key, value, _identity if score_mod is None else score_mod, mask.as_tuple(), scale, options
    )
    if sink is not None:  # one more column of the softmax, without a value
        logit = sink.to(lse.dtype)[:, None]
        out = out * torch.sigmoid(lse - logit).to(out.dtype)[..., None]
        lse = torch.logaddexp(lse, logit)
    return out, lse, max_scores


def _everything(query: Tensor) -> BlockMask:
    """Return torch's "no block mask": one block of size 2^30."""
    one = query.new_ones((1, 1, 1), dtype=torch.int32)
    return _block_mask((1, 1), (one, one.new_zeros((1, 1, 1, 1)), None, None), (WHOLE, WHOLE), noop_mask)


def _block_mask(
    lengths: tuple[int, int], lists: tuple[Any, ...], block_size: tuple[int, int], mask_mod: Callable[..., Any]
) -> BlockMask:
    """Return a BlockMask without the lists by key, which lowbit's backward creates itself."""
    return BlockMask(lengths, *lists, None, None, None, None, block_size, mask_mod)


def _identity(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


def _ours(query: Tensor, options: dict[str, Any]) -> bool:
    return _MARK in options or everything and devices.has_kernels(query.device)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any], block_mask: tuple[Any, ...], scale: float,
    kernel_options: dict[str, Any], score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run `run_mods` with the arguments of the higher-order op. A subgraph gets its captured tensors as further
    arguments."""
    score = Subgraph(score_mod, _tensors(score_mod_other_buffers))
    mask = Subgraph(block_mask[-1], _tensors(mask_mod_other_buffers))
    rebuilt = _block_mask(block_mask[:2], block_mask[2:6], tuple(block_mask[-3:-1]), mask)
    if key.size(0) != query.size(0):
        key, value = (tensor.expand(query.size(0), -1, -1, -1) for tensor in (key, value))
    dropout_p, wants_max = kernel_options.get(_MARK, 0.0), bool(kernel_options.get("OUTPUT_MAX", False))
    return run_mods(query, key, value, score, rebuilt, scale, dropout_p=dropout_p, want_max_scores=wants_max)


def _tensors(captured: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the captured values with symbolic sizes as tensors, because they change between calls and the program must
    read them."""
    return tuple(
        torch.scalar_tensor(item, dtype=torch.int64, device="cpu") if isinstance(item, torch.SymInt) else item
        for item in captured
    )


@constant_in_graphs
def take_flex_op() -> bool:
    """Register lowbit's kernel in front of torch's, for every way in which the op can be called, unless this was done
    before."""
    with _lock:
        if not _taken:
            _take_flex_op()
            _taken.append(True)
    return True


def _take_flex_op() -> None:
    kernels = flex_op.py_kernels

    def key(ours_at: DispatchKey, theirs_at: DispatchKey) -> None:
        theirs = kernels[theirs_at]

        def run(query: Tensor, *args: Any, **kwargs: Any) -> Any:
            return (_attention if _ours(query, args[5]) else theirs)(query, *args, **kwargs)

        flex_op.py_impl(ours_at)(run)

    key(DispatchKey.AutogradCPU, DispatchKey.Autograd)
    key(DispatchKey.CPU, DispatchKey.CompositeExplicitAutograd)
    for mode in (
        FunctionalTensorMode,
        ProxyTorchDispatchMode,
        FakeTensorMode,
    ):  # modes come first in inference mode, which has no autograd key
        theirs = flex_op.python_key_table.get(mode)
        if theirs is not None:
            flex_op.python_key_table[mode] = _mode_kernel(theirs)


def _mode_kernel(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def run(mode: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _ours(query, args[5]):
            return theirs(mode, query, *args, **kwargs)
        with mode:
            return _attention(query, *args, **kwargs)

    return run
