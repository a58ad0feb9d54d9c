# SPDX-License-Identifier: Apache-2.0
"""flex_attention: any score_mod and BlockMask, forward and backward, in eager mode without a compiler."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from lowbit import devices
from lowbit.attention.compiled import compiled_attention
from lowbit.attention.packed import with_documents
from lowbit.attention.plain import DTYPES, autocast_device, is_plain, softmax_scale
from lowbit.attention.run_mods import WHOLE, run_mods
from lowbit.ops.tracing import is_traced
from lowbit.score.program_cache import positional_arguments

_NAME = "flex_attention"
_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")  # the values that torch accepts; none has an effect here


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: Any = None,
    dropout_p: float = 0,  # not 0.0, which torch.compile(dynamic=True) would make symbolic and trace twice
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Any:
    """Return softmax(score_mod(scale * query key^T)) value, limited to the scores in ``block_mask``, as torch's
    function of this name.

    It is differentiable once, through the result and lse, with respect to query, key, value, sink and the
    floating-point tensors that score_mod captures. In forward mode (torch.func.jvp), mods and block masks run through
    torch, slowly. A query that sees no key gets the result 0 and lse -inf. Only a tile of scores is held at a time.

    Args:
        query: ``[B, Hq, L, E]``, float32, bfloat16, float16 (accumulated in float32) or float64.
        key: ``[B or 1, Hkv, S, E]``, any floating dtype; a batch of 1 requires a block_mask of batch B.
        value: ``[B or 1, Hkv, S, Ev]``, any floating dtype.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``; h is the query head. It may capture tensors of any dtype.
        block_mask: torch's BlockMask, for example from ``create_block_mask``, for lengths L and S.
        scale: the factor of the scores, by default 1 / sqrt(E).
        enable_gqa: allow Hq to be a multiple of Hkv.
        return_lse: also return lse (deprecated by torch: use return_aux).
        kernel_options: torch's options for its GPU kernels; they have no effect.
        return_aux: ``AuxRequest(lse=, max_scores=)`` to return (out, AuxOutput). Both are ``[B, Hq, L]``, float32
            (float64 for float64 inputs).
        dropout_p: the probability of dropping each attention probability; the seed comes from torch's generator.
        sink: ``[Hq]``, a logit per head that takes part in the softmax and has no value; lse includes it.
        cu_seqlens: int ``[documents + 1]``, the offsets at which documents begin in L (= S), then L. Tokens see only
            their own document.

    Returns:
        ``[B, Hq, L, Ev]`` in the dtype of query and the order of its strides; (out, lse) with return_lse; (out,
        AuxOutput) with return_aux.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument is invalid; the message names it.
        RuntimeError: a mod branches on values, draws random numbers or writes to its arguments, or block_mask is a
            slice.

    Example:
        >>> mask = lowbit.create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 256), None, None, 4096, 4096)
        >>> out = lowbit.flex_attention(q, k, v, lambda s, b, h, q, k: s + bias[h, q - k], mask)
    """
    query, key, value = _autocast(query, key, value)
    _check(
        query, key, value, score_mod, block_mask, enable_gqa, return_lse, return_aux, dropout_p, sink, kernel_options
    )
    scale = softmax_scale(_NAME, scale, query.size(-1))
    if cu_seqlens is not None:
        block_mask = with_documents(cu_seqlens, block_mask, query, key)
    if key.size(0) != query.size(0):
        key, value = (tensor.expand(query.size(0), -1, -1, -1) for tensor in (key, value))
    wants_max = return_aux is not None and return_aux.max_scores
    run = compiled_attention if torch.compiler.is_dynamo_compiling() else run_mods
    dtype = query.dtype
    if not (key.dtype == value.dtype == dtype):
        query, key, value = _widened(query, key, value)
    out, lse, max_scores = run(query, key, value, score_mod, block_mask, scale, dropout_p, sink, wants_max)
    out = out.to(dtype)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=max_scores if wants_max else None)
    return (out, lse) if return_lse else out


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    device = autocast_device(tensors[0])
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(
        tensor.to(torch.get_autocast_dtype(device)) if isinstance(tensor, Tensor) else tensor for tensor in tensors
    )


def _widened(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in the widest of their dtypes, of at least 16 bits. Gradients have the original dtypes."""
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors if tensor.dtype in DTYPES])
    return [tensor.to(dtype) for tensor in tensors]


def _check(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, enable_gqa: bool, return_lse: bool,
    return_aux: Any,
    dropout_p: float, sink: Tensor | None, kernel_options: Mapping[str, Any] | None,
) -> None:  # fmt: skip
    if not is_plain(query, key, value, enable_gqa):
        _check_tensors(query, key, value, enable_gqa)
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise TypeError(f"{_NAME}: block_mask must be a BlockMask (create_block_mask), got {type(block_mask).__name__}")
    _check_block_mask(query, key, block_mask)
    if score_mod is not None:
        if not callable(score_mod):
            raise TypeError(f"{_NAME}: score_mod must be callable, got {type(score_mod).__name__}")
        if not torch.compiler.is_dynamo_compiling() and positional_arguments(score_mod) != 5:
            raise TypeError(
                f"{_NAME}: score_mod must take (score, b, h, q_idx, kv_idx), got a function of "
                f"{positional_arguments(score_mod)} "
                "positional arguments"
            )
    backend = (kernel_options or {}).get("BACKEND", "AUTO")
    if backend not in _BACKENDS:
        raise ValueError(
            f"{_NAME}: Invalid BACKEND value {backend!r} in kernel_options, must be one of {', '.join(_BACKENDS)}"
        )
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise TypeError(f"{_NAME}: return_aux must be an AuxRequest, got {type(return_aux).__name__}")
    if return_lse and return_aux is not None:
        raise ValueError(
            f"{_NAME}: Cannot specify both return_lse and return_aux. return_lse is deprecated, please use "
            "return_aux=AuxRequest(lse=True)"
        )
    if return_lse and not is_traced():
        warnings.warn(
            f"{_NAME}: return_lse is deprecated, please use return_aux=AuxRequest(lse=True)",
            FutureWarning,
            stacklevel=3,
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{_NAME}: dropout_p must be in [0, 1), got {dropout_p}")
    if sink is not None and not isinstance(sink, Tensor):
        raise TypeError(f"{_NAME}: sink must be a tensor [{query.size(1)}], got {type(sink).__name__}")
    if sink is not None and (sink.shape != query.shape[1:2] or not sink.is_floating_point()):
        raise ValueError(
            f"{_NAME}: sink must be floating, [{query.size(1)}] (one logit per query head), got {_dtype(sink)} "
            f"{list(sink.shape)}"
        )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{_NAME}: {name} must be a tensor, got {type(tensor).__name__}")
    if not query.device.type == key.device.type == value.device.type:
        raise ValueError(
            f"{_NAME}: Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device}, "
            f"key.device: {key.device}, and value.device: {value.device} instead."
        )
    for name, tensor in tensors.items():
        if tensor.is_nested:
            raise NotImplementedError(
                f"{_NAME}: {name} must be dense: flex_attention does not support NestedTensor inputs; see cu_seqlens"
            )
        devices.check(_NAME, name, tensor.device, kernel="attention_forward", meta=True)
        if tensor.dim() != 4:
            raise NotImplementedError(
                f"NYI: query, key, and value must be 4D tensors ({_NAME}: {name} has shape {list(tensor.shape)})"
            )
        if tensor is not query and tensor.is_floating_point():
            continue
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{_NAME}: {name} must be float32, bfloat16, float16 or float64, got {_dtype(tensor)}")
    if query.size(-1) != key.size(-1):
        raise ValueError(
            f"{_NAME}: Expect query and key/value to have the same embedding dimension but got E={query.size(-1)} and "
            f"E={key.size(-1)}."
        )
    if query.size(-1) == 0 or value.size(-1) == 0:
        raise ValueError(
            f"{_NAME}: the embedding dimensions must be at least 1, got E={query.size(-1)} and Ev={value.size(-1)}"
        )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"{_NAME}: value must have batch, heads and length of key, got {list(value.shape)} and {list(key.shape)}"
        )
    _check_heads(query, key, enable_gqa)


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    heads, kv_heads = query.size(1), key.size(1)
    if not enable_gqa and heads != kv_heads:
        raise ValueError(
            f"{_NAME}: Expect query and key/value to have the same number of heads but got Hq={heads} and "
            f"Hkv={kv_heads}. "
            "Try setting enable_gqa=True for GQA."
        )
    if enable_gqa and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"{_NAME}: Expect number of query heads to be a multiple of kv heads for GQA but got Hq={heads} and "
            f"Hkv={kv_heads}."
        )


def _check_block_mask(query: Tensor, key: Tensor, mask: BlockMask | None) -> None:
    if query.size(0) != key.size(0):
        if mask is None:
            raise ValueError(
                f"{_NAME}: Expect query and key/value to have the same batch size, or non-none block_mask, "
                f"but got block_mask=None, Bq={query.size(0)}, and Bkv={key.size(0)}."
            )
        if mask.kv_num_blocks.size(0) != query.size(0) or key.size(0) != 1:
            raise ValueError(
                f"{_NAME}: Expect query and key/value to have the same batch size, or block_mask and query to have the "
                "same batch size "
                f"(and key/value 1), but got Bq={query.size(0)}, Bkv={key.size(0)}, "
                f"B_block_mask={mask.kv_num_blocks.size(0)}."
            )
    if mask is None:
        return
    if mask.mask_mod is getattr(torch_flex, "_sliced_mask_mod_error", None):
        raise RuntimeError(
            f"{_NAME}: Cannot use mask_mod from a sliced BlockMask; set block_mask.mask_mod from the one it was sliced "
            "from"
        )
    if tuple(mask.BLOCK_SIZE) == (WHOLE, WHOLE):
        return
    if mask.kv_num_blocks.dim() != 3:
        raise ValueError(
            f"{_NAME}: block_mask must have a batch and a head dimension, got {list(mask.kv_num_blocks.shape)} block "
            "counts"
        )
    q_len, kv_len = mask.seq_lengths
    if query.size(2) > q_len or key.size(2) > kv_len:
        shape = _shape(query, key, mask)
        raise ValueError(
            f"{_NAME}: {shape} It was created for a smaller length than it is used for: create a new block mask."
        )
    if query.size(2) != q_len or key.size(2) != kv_len:
        shape = _shape(query, key, mask)
        raise ValueError(
            f"{_NAME}: {shape} It was created for a larger length than it is used for: create a new one, or 'adjust' "
            "the existing block "
            "mask by block_mask._adjust(q_len, kv_len), which crops it to the upper left corner (not right for every "
            "mask_mod)."
        )
    for name, size, number in (
        ("batch", query.size(0), mask.kv_num_blocks.size(0)),
        ("head", query.size(1), mask.kv_num_blocks.size(1)),
    ):
        if number != 1 and number < size:
            raise ValueError(f"{_NAME}: block_mask must have {name} size 1 or {size} or more, got {number}")
    if query.device != mask.kv_num_blocks.device:
        raise RuntimeError(
            f"{_NAME}: Expect q/k/v and block_mask to be on the same device but got {query.device} and "
            f"{mask.kv_num_blocks.device}."
        )


def _shape(query: Tensor, key: Tensor, mask: BlockMask) -> str:
    got = f"q_len={query.size(2)} and kv_len={key.size(2)}"
    return f"block_mask was created for block_mask.shape={tuple(mask.shape)} but got {got}."


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
