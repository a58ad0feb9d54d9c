# SPDX-License-Identifier: Apache-2.0
"""create_block_mask: find the blocks that a mask leaves empty, full or partial, without evaluating it on every score.

The mask's program is evaluated on whole blocks, with intervals in place of numbers. The few blocks that this does not
decide are evaluated score by score (csrc/ops/block_classes.hpp). For long sequences this is much faster than torch,
which evaluates every score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_mask, noop_mask, or_masks

from lowbit import _C
from lowbit.ops.tracing import is_traced
from lowbit.score.program import UnknownOp
from lowbit.score.program_cache import bind, positional_arguments, warn_unknown

EMPTY, PARTIAL, FULL = 0, 1, 2
_torch_create_block_mask = torch_flex.create_block_mask  # the original, even after install()


def create_block_mask(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Return torch's BlockMask for a mask_mod. Arguments and result are those of torch's function of this name.

    Args:
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``, bool: True if the query sees the key. It may capture tensors.
        B, H: the number of batch entries and query heads with masks of their own; None means 1, a mask shared by all.
        Q_LEN, KV_LEN: the numbers of queries and keys.
        device: the device of the result, by default the CPU. For other devices, if mask_mod captures no tensors, the
            result is computed on the CPU and moved. Otherwise the call goes to torch, as do calls inside torch.vmap or
            torch.func.
        BLOCK_SIZE: the numbers of queries and keys in a block, or one number for both.
        separate_full_blocks: if False, full blocks are listed as partial ones.

    Returns:
        The BlockMask.

    Raises:
        AssertionError: ``mask_mod`` does not take four arguments.
        ValueError: a length is negative or a block size is below 1.
        RuntimeError: ``mask_mod`` branches on values, draws random numbers, or writes to its arguments.

    Example:
        >>> mask = lowbit.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8192, 8192)
    """
    device = torch.device("cpu" if device is None else device)
    given = {"_compile": (_compile, False), "separate_full_blocks": (separate_full_blocks, True),
             "compute_dq_write_order": (compute_dq_write_order, False), "dq_kv_order": (dq_kv_order, True)}  # fmt: skip
    rest = {
        name: value for name, (value, default) in given.items() if value != default
    }  # only non-default arguments: older torch does not have all
    traced = is_traced() or torch._C._are_functorch_transforms_active()
    if not traced and device.type not in ("cpu", "meta") and _captures_nothing(mask_mod):
        return create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, "cpu", BLOCK_SIZE, **rest).to(device)
    if traced or device.type != "cpu":
        return _torch_create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, **rest)
    _check(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE)
    q_block, kv_block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    try:
        batches, heads = (1 if size is None else size for size in (B, H))
        classes = block_classes(mask_mod, batches, heads, Q_LEN, KV_LEN, q_block, kv_block)
    except UnknownOp as unknown:
        warn_unknown("create_block_mask", "mask_mod", unknown)
        return _torch_create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, **rest)
    made = from_classes(classes, mask_mod, (Q_LEN, KV_LEN), (q_block, kv_block), separate_full_blocks)
    if compute_dq_write_order:
        made.dq_write_order, made.dq_write_order_full = torch_flex._compute_dq_write_order_from_block_mask(
            made, dq_kv_order=dq_kv_order
        )
    return made


def _captures_nothing(mask_mod: Callable[..., Any]) -> bool:
    try:
        return not bind("create_block_mask", mask_mod, mask=True).captured
    except (UnknownOp, TypeError):  # torch raises the error for an object that is not a function of four indices
        return False


def block_classes(
    mask_mod: Callable[..., Any], B: int, H: int, q_len: int, kv_len: int, q_block: int, kv_block: int
) -> Tensor:
    """Return uint8 ``[B, H, q blocks, kv blocks]``: EMPTY, PARTIAL or FULL. A block that extends past an end is never
    FULL, as in torch."""
    classes = torch.empty(B, H, -(-q_len // q_block), -(-kv_len // kv_block), dtype=torch.uint8, device="cpu")
    if not classes.numel():  # no block to call mask_mod for
        return classes
    program = bind("create_block_mask", mask_mod, mask=True)
    if program.code:
        _C.block_classes(program.code, program.captured, B, H, q_len, kv_len, q_block, kv_block, classes)
        return classes
    classes.fill_(FULL)
    if q_len % q_block:
        classes[..., -1, :] = PARTIAL
    if kv_len % kv_block:
        classes[..., -1] = PARTIAL
    return classes


def from_classes(
    classes: Tensor,
    mask_mod: Callable[..., Any],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    separate_full_blocks: bool = True,
) -> BlockMask:
    """Return the BlockMask with these classes of blocks."""
    partial = classes == PARTIAL if separate_full_blocks else classes != EMPTY
    full = classes == FULL if separate_full_blocks else None
    kv_num_blocks, kv_indices = _lists(partial)
    q_num_blocks, q_indices = _lists(partial.transpose(-2, -1))
    full_kv_num_blocks, full_kv_indices = _lists(full) if full is not None else (None, None)
    full_q_num_blocks, full_q_indices = _lists(full.transpose(-2, -1)) if full is not None else (None, None)
    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
    )


def to_classes(mask: BlockMask) -> Tensor:
    """Return the classes of the blocks in a BlockMask; the inverse of `from_classes`."""
    rows, columns = (-(-length // size) for length, size in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    classes = mask.kv_num_blocks.new_zeros(*mask.kv_num_blocks.shape[:-1], rows, columns + 1, dtype=torch.uint8)
    lists = [(mask.kv_num_blocks, mask.kv_indices, PARTIAL), (mask.full_kv_num_blocks, mask.full_kv_indices, FULL)]
    for number, indices, value in lists:
        if number is not None:
            listed = torch.arange(indices.shape[-1], device=indices.device) < number[..., None]
            classes.scatter_(-1, torch.where(listed, indices, columns).long(), value)
    return classes[..., :columns]


def _lists(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of wanted columns in each row, and the column indices: first the wanted ones, then the others,
    each in ascending order (as in torch)."""
    return wanted.sum(-1, dtype=torch.int32), wanted.to(torch.uint8).argsort(dim=-1, descending=True, stable=True).to(
        torch.int32
    )


def _check(mask_mod: Any, B: Any, H: Any, q_len: int, kv_len: int, block_size: int | tuple[int, int]) -> None:
    if not callable(mask_mod):
        raise AssertionError(f"create_block_mask: mask_mod must be callable, got {type(mask_mod).__name__}")
    count = positional_arguments(mask_mod)
    if count != 4:
        raise AssertionError(
            f"create_block_mask: mask_mod must take (b, h, q_idx, kv_idx), got a function of {count} positional "
            "arguments"
        )
    for name, value in (("B", B), ("H", H), ("Q_LEN", q_len), ("KV_LEN", kv_len)):
        if value is not None and value < 0:
            raise ValueError(f"create_block_mask: {name} must be at least 0, got {value}")
    if any(size < 1 for size in ((block_size,) if isinstance(block_size, int) else block_size)):
        raise ValueError(f"create_block_mask: BLOCK_SIZE must be at least 1, got {block_size}")


__all__ = ["BlockMask", "and_masks", "create_block_mask", "create_mask", "noop_mask", "or_masks"]
