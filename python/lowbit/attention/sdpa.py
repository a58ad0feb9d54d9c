# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention on the CPU: forward and backward in tiles, for every dtype and
mask."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from lowbit import devices
from lowbit.attention.plain import autocast_device, is_plain, softmax_scale
from lowbit.ops.attention import attention

_NAME = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax(scale * query key^T + attn_mask) value, computed in tiles of scores.

    Signature and meaning are torch's, including autocast. It is differentiable in query, key, value and a
    floating-point attn_mask, and twice differentiable without dropout. In forward mode, torch's own ops compute it,
    with the whole matrix of scores. A query that sees no key gets the result 0. Dropout depends only on the seed, not
    on the number of threads.

    Args:
        query: ``[..., Hq, L, E]``, also ``[L, E]`` and ``[H, L, E]``; float32, bfloat16, float16 (accumulated in
            float32) or float64.
        key: ``[..., Hkv, S, E]``, dtype of query; leading dimensions broadcast.
        value: ``[..., Hkv, S, Ev]``, dtype of query.
        attn_mask: bool (True: visible) or floating point (added), broadcastable to ``[..., Hq, L, S]``; or torch's
            CausalBias.
        dropout_p: the probability, in 0..1, of dropping each attention probability. It is applied whenever it is above
            0.
        is_causal: whether query i sees only keys 0 to i, in addition to attn_mask.
        scale: the factor of the scores, by default 1 / sqrt(E).
        enable_gqa: allow key and value to have fewer heads; Hq must be a multiple of both numbers.

    Returns:
        ``[..., Hq, L, Ev]`` in the dtype of query; dense, in the stride order of a 4-d query.

    Raises:
        ValueError: a shape, a device or an option is invalid.
        TypeError: a dtype is invalid.

    Example:
        >>> q, k, v = (torch.randn(1, 8, 128, 64, requires_grad=True) for _ in range(3))
        >>> lowbit.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    """
    if torch.is_autocast_enabled(device := autocast_device(query)):
        query, key, value, attn_mask = (_autocast(tensor, device) for tensor in (query, key, value, attn_mask))
    if attn_mask is None and dropout_p == 0.0 and is_plain(query, key, value, enable_gqa):
        return attention(query, key, value, scale=softmax_scale(_NAME, scale, query.shape[3]), causal=is_causal)[0]
    _check(query, key, value, attn_mask, is_causal, enable_gqa)
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal = _of_causal_bias(attn_mask, query, key.shape[-2])
    q, k, v, leading = _to_heads(query, key, value, enable_gqa)
    q, k, v = _with_columns(q), _with_columns(k), _with_columns(v)
    mask = None if attn_mask is None else _to_mask(attn_mask, leading, q.shape[:2], query.shape[-2], key.shape[-2])
    scale = softmax_scale(_NAME, scale, q.shape[-1])
    out, _, _ = attention(q, k, v, scale=scale, causal=is_causal, mask=mask, dropout_p=dropout_p)
    return out[..., : value.shape[-1]].reshape(*leading, out.shape[-2], value.shape[-1])


def _with_columns(tensor: Tensor) -> Tensor:
    """Return the tensor, with a column of zeros if its head dimension is 0. The column adds nothing to a score, and is
    removed from the result."""
    return tensor if tensor.shape[-1] > 0 else torch.nn.functional.pad(tensor, (0, 1))


def _autocast(tensor: Any, device: str) -> Any:
    if (
        not isinstance(tensor, Tensor)
        or isinstance(tensor, CausalBias)
        or not tensor.is_floating_point()
        or tensor.dtype == torch.float64
    ):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _check(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> None:
    """Raise an error for tensors that cannot be brought into the shape of the op; the op checks the rest."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_NAME}: {name} must be a tensor, got {type(tensor).__name__}")
    for name, tensor in tensors.items():
        devices.check(_NAME, name, tensor.device, kernel="attention_forward", meta=True)
        if tensor.is_nested:
            raise ValueError(f"{_NAME}: {name} must be a dense tensor, got a nested one")
        if tensor.dim() < 2:
            raise ValueError(f"{_NAME}: {name} must have at least 2 dimensions, got shape {list(tensor.shape)}")
    if enable_gqa and not (query.dim() > 2 and key.dim() > 2 and value.dim() > 2):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise ValueError(
            f"{_NAME}: query, key and value must have a dimension of heads with enable_gqa=True, got {shapes}"
        )
    if attn_mask is None:
        return
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"{_NAME}: attn_mask must be a tensor, got {type(attn_mask).__name__}")
    if isinstance(attn_mask, CausalBias):
        if is_causal:
            raise ValueError(f"{_NAME}: CausalBias should not be used with causal=True: is_causal must be False")
        return
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise TypeError(
            f"{_NAME}: attn_mask must be bool, float32 or of the dtype of query, got {_name(attn_mask.dtype)}"
        )


def _of_causal_bias(bias: CausalBias, query: Tensor, kv_len: int) -> tuple[Tensor | None, bool]:
    """Return torch's CausalBias as attn_mask and is_causal."""
    q_len = query.shape[-2]
    if (bias.seq_len_q, bias.seq_len_kv) != (q_len, kv_len):
        raise ValueError(
            f"{_NAME}: attn_mask must be a CausalBias of lengths {q_len}, {kv_len}, got {bias.seq_len_q}, "
            f"{bias.seq_len_kv}"
        )
    if bias.variant == CausalVariant.UPPER_LEFT or q_len == kv_len:
        return None, True
    return bias._materialize(query.device if query.is_cuda else "cpu"), False


def _to_heads(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Return q, k, v as 4-d tensors, and the leading dimensions of the result."""
    if enable_gqa:
        q_heads, k_heads, v_heads = query.shape[-3], key.shape[-3], value.shape[-3]
        if any(q_heads % heads if heads else q_heads for heads in (k_heads, v_heads)):
            raise ValueError(
                f"{_NAME}: the heads of query must be a multiple of those of key and value, got {q_heads}, {k_heads}, "
                f"{v_heads}"
            )
        if k_heads != v_heads:
            key, value = _repeated(key, math.lcm(k_heads, v_heads)), _repeated(value, math.lcm(k_heads, v_heads))
        batch = _broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        expanded = [tensor.expand(*batch, *tensor.shape[-3:]) for tensor in (query, key, value)]
        leading = (*batch, q_heads)
    else:
        leading = _broadcast(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        kv_heads = (
            key.shape[-3:-2] if key.shape[-3:-2] == value.shape[-3:-2] == (1,) else leading[-1:]
        )  # one head for all
        expanded = [query.expand(*leading, *query.shape[-2:])]
        expanded += [tensor.expand(*leading[:-1], *kv_heads, *tensor.shape[-2:]) for tensor in (key, value)]
    if len(leading) == 2:
        return *expanded, leading
    if len(leading) < 2:
        expanded = [tensor[(None,) * (4 - tensor.dim())] for tensor in expanded]
        return *expanded, leading
    return *(tensor.flatten(0, -4) for tensor in expanded), leading


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Repeat each head so that there are ``heads``, which is a multiple of the present number."""
    return tensor.repeat_interleave(heads // max(1, tensor.shape[-3]), -3)


def _broadcast(*shapes: torch.Size) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        text = ", ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"{_NAME}: the leading dimensions of query, key and value must broadcast (heads of key: see enable_gqa), "
            "got "
            f"{text}"
        ) from None


def _to_mask(mask: Tensor, leading: tuple[int, ...], heads: torch.Size, q_len: int, kv_len: int) -> Tensor:
    """Return the mask as a 4-d tensor in which each size is 1 or full."""
    shape = (*leading, q_len, kv_len)
    padded = mask[(None,) * (len(shape) - mask.dim())] if mask.dim() <= len(shape) else mask
    if padded.dim() != len(shape) or any(size not in (1, full) for size, full in zip(padded.shape, shape, strict=True)):
        raise ValueError(f"{_NAME}: attn_mask must broadcast to {list(shape)}, got {list(mask.shape)}")
    if len(leading) < 2:
        return padded[(None,) * (2 - len(leading))]
    if len(leading) > 2:
        batch = padded.shape[: len(leading) - 1]
        if any(size != 1 for size in batch):
            padded = padded.expand(*leading[:-1], *padded.shape[-3:])
        return padded.flatten(0, -4)
    return padded


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
