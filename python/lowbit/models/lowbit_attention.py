# SPDX-License-Identifier: Apache-2.0
"""The attention function behind ``attn_implementation="lowbit"``, called by transformers for each layer.

out = softmax(softcap(scaling * q k^T) + mask + bias) v,  with an optional sink as one more score
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lowbit.attention.sdpa import scaled_dot_product_attention
from lowbit.models import attention_arguments
from lowbit.models.attention_masks import wants_eager_mask
from lowbit.models.document_mask import DocumentMask
from lowbit.models.latent_states import LatentStates
from lowbit.ops.attention import attention
from lowbit.score.program import ProgramBuilder

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # the first versions of transformers 5 do not expose it
    _active_collector = None


def lowbit_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, with the signature that transformers calls.

    Args:
        module: the attention module of the model.
        query: float ``[B, Hq, L, E]``.
        key: float ``[B, Hkv, S, E]``.
        value: float ``[B, Hkv, S, Ev]``. Key and value may be one `LatentStates` instead.
        attention_mask: boolean or float, broadcastable to ``[B, Hq, L, S]``; a `DocumentMask`; or None.
        softcap: scores become ``softcap * tanh(score / softcap)`` before they are masked (Gemma 2).
        position_bias: ``[1 or B, Hq, L, S]``, added to the scores (T5).
        s_aux: ``[Hq]``, a sink: an additional score per head, which has no value (gpt-oss).
        sinks: ``[B, Hq, L, 1]``, a sink for each query (Inkling 2).
        indices: int ``[B, L, K]``, the only keys that each query may see, as far as the mask allows it (DeepSeek 3.2).
        block_indices: int ``[B, Hkv, L, K]``, the same for blocks of keys, -1 for none (MiniMax M3).
        others: the arguments listed by name in `attention_arguments`.

    Returns:
        The output ``[B, L, Hq, Ev]``, and None in place of attention weights.

    Raises:
        NotImplementedError: the model asks for attention weights, a paged cache, or dropout with a quantized cache.
        ValueError: an argument is unknown, or packed sequences come without a mask.
    """
    if weights_are_recorded(module):
        raise NotImplementedError(attention_arguments.REFUSED["output_attentions"])
    attention_arguments.check(attention_mask, others)
    if type(attention_mask) is DocumentMask:
        if type(key) is Tensor and position_bias is sinks is indices is block_indices is None:
            options = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
            return _by_document(module, query, key, value, attention_mask, options), None
        attention_mask = attention_mask.read()
    latent = key if type(key) is LatentStates else None
    if latent is not None:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key, value, is_latent = latent.with_queries(query)
        latent = latent if is_latent else None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1 and not _all_is_seen(module)
    store = getattr(key, "store", None)
    if store is not None and dropout:
        raise NotImplementedError("QuantizedCache: dropout must be 0, a quantized cache has no gradient")
    if (
        store is None and causal and key.shape[2] > query.shape[2]
    ):  # an empty static cache, which the prompt fills from its beginning
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
    if position_bias is not None:
        attention_mask = _joined(position_bias, attention_mask)
    if indices is not None:
        attention_mask = _joined(_of_keys(indices, key.shape[2]), attention_mask)
    if block_indices is not None:
        attention_mask = _joined(_of_blocks(module, block_indices, query.shape[1], key.shape[2]), attention_mask)
    if store is not None and softcap is None and sinks is None:
        sink = None if s_aux is None else s_aux.detach().float()
        out = store.attend(query, scale=scaling, causal=causal, mask=attention_mask, sink=sink)
        return out.transpose(1, 2).contiguous(), None
    if store is not None:  # The quantized cache supports neither a softcap nor a sink for each query.
        key, value = store.keys(query.dtype), store.values(query.dtype)
        attention_mask, causal = _at_the_end(attention_mask, causal, query.shape[2], key.shape[2])
    if softcap is None and s_aux is None and sinks is None:
        out = scaled_dot_product_attention(query, key, value, attention_mask, dropout, causal, scaling, enable_gqa=True)
    else:
        out, lse, _ = attention(
            query,
            key,
            value,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            causal=causal,
            mask=attention_mask,
            dropout_p=dropout,
            score_mod=() if softcap is None else softcap_program(float(softcap)),
            sink=None if s_aux is None else s_aux.float(),
        )
        if sinks is not None:  # The keys keep e^lse / (e^lse + e^sink) of the probability.
            out = out * torch.sigmoid(lse[..., None] - sinks).to(out.dtype)
    if latent is not None:
        out = latent.to_values(out)
    return out.transpose(1, 2).contiguous(), None


def _by_document(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: DocumentMask, options: dict[str, Any]
) -> Tensor:
    """Return the result ``[1, L, Hq, Ev]`` of packed documents, each of which is a causal call of its own."""
    parts = zip(*(tensor.split(mask.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    results = []
    for q, k, v in parts:
        length, seen = q.shape[2], None
        if mask.window is not None and mask.window < length:
            every = torch.ones(length, length, dtype=torch.bool, device=q.device)
            seen = every.tril().triu(1 - mask.window)[None, None]
        results.append(lowbit_attention(module, q, k, v, seen, is_causal=True, **options)[0])
    return torch.cat(results, dim=1)


def _all_is_seen(module: torch.nn.Module) -> bool:
    """Whether every query sees all keys in a call without a mask. As in eager attention, this holds even for a layer
    that calls itself causal."""
    config = getattr(module, "config", None)
    return config is not None and wants_eager_mask(config)


def weights_are_recorded(module: torch.nn.Module) -> bool:
    """Whether a model around this call records attention weights. Not every model passes ``output_attentions`` on."""
    if _active_collector is None:
        return False
    if torch.compiler.is_dynamo_compiling() and not module._forward_hooks:
        return False  # Nothing unhooked is recorded, and while Dynamo traces, other threads use the collector too.
    return any("attentions" in key for key in _active_collector.get() or ())


def _joined(one: Tensor, mask: Tensor | None) -> Tensor:
    """Combine two masks, each boolean or floating point."""
    if mask is None:
        return one
    if one.dtype == mask.dtype == torch.bool:
        return one & mask
    if mask.dtype == torch.bool:
        return one.masked_fill(~mask, -torch.inf)
    return mask.masked_fill(~one, -torch.inf) if one.dtype == torch.bool else one + mask


def _of_keys(indices: Tensor, length: int) -> Tensor:
    """Return the boolean mask ``[B, 1, L, S]`` of the keys selected for each query."""
    chosen = torch.zeros(*indices.shape[:2], length, dtype=torch.bool, device=indices.device)
    return chosen.scatter(-1, indices.long(), True).unsqueeze(1)


def _of_blocks(module: torch.nn.Module, indices: Tensor, heads: int, length: int) -> Tensor:
    """Return the boolean mask ``[B, Hq, L, S]`` of the blocks of keys selected for each query and group of heads."""
    size = module.indexer.block_size
    blocks = -(-length // size)
    chosen = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long().masked_fill(indices < 0, blocks), True)[..., :blocks]
    chosen = chosen.repeat_interleave(size, dim=-1)[..., :length]
    return chosen.repeat_interleave(heads // indices.shape[1], dim=1)


def _at_the_end(mask: Tensor | None, causal: bool, q_length: int, length: int) -> tuple[Tensor | None, bool]:
    """Return mask and causal flag for queries that are the last of ``length`` tokens, not the first."""
    if not causal or q_length == length:
        return mask, causal
    seen = torch.ones(q_length, length, dtype=torch.bool, device="cpu").tril(length - q_length)[None, None]
    return _joined(seen, mask), False


@functools.cache
def softcap_program(softcap: float) -> tuple[int, ...]:
    """Return the score program of ``softcap * tanh(score / softcap)``."""
    program = ProgramBuilder()
    capped = program.op("tanh", program.op("mul", program.op("score"), program.constant(1.0 / softcap)))
    return tuple(program.finish(program.op("mul", capped, program.constant(softcap))))
