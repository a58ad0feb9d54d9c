# SPDX-License-Identifier: Apache-2.0
"""transformers: ``attn_implementation="lowbit"``, and a quantized cache as ``past_key_values``.

Importing this module registers the name with transformers; lowbit does so itself as soon as transformers is imported
(when_imported.py). The cache works with every attention implementation (another one is given dequantized
keys and values); with "lowbit" its codes are multiplied as they are.

Example:
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="lowbit")
    >>> from lowbit.integrations.transformers import QuantizedCache
    >>> model.generate(ids, past_key_values=QuantizedCache("int8"), max_new_tokens=20)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from lowbit.attention.kv_layer import QuantizedKVLayer
from lowbit.attention.sdpa import scaled_dot_product_attention
from lowbit.integrations.growing_cache import grow_caches_in_place
from lowbit.ops.attention import attention
from lowbit.score.program import ProgramBuilder

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # the first versions of transformers 5 record outputs where nothing else can see it
    _active_collector = None

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"lowbit.integrations.transformers needs transformers 5 or later, got {transformers.__version__}: older caches "
        "are other "
        "classes"
    )

NAME = "lowbit"


class QuantizedCache(Cache):
    """A transformers cache in int8 or int4: ``past_key_values`` of any decoder with full attention.

    The first prompt is attended to in float, as it is at hand; it is quantized for the tokens after it.

    Args:
        format: ``"int8"`` or ``"int4"``, as in `lowbit.QuantizedKVCache`.

    Raises:
        ValueError: the format is another one.
    """

    def __init__(self, format: str = "int8") -> None:
        QuantizedKVLayer(format)  # checks the format
        self.format = format
        super().__init__(layer_class_to_replicate=lambda *_, **__: _Layer(format))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.store.nbytes for layer in self.layers)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: it is positive, or a layer holds fewer; then no layer is changed.
        """
        for layer in self.layers:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)


class _Layer(CacheLayerMixin):
    """A layer as transformers expects it, on a QuantizedKVLayer."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, format: str) -> None:
        super().__init__()
        self.store = QuantizedKVLayer(format)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        first = self.store.length == 0
        self.store.append(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if first:
            return key_states, value_states
        if torch.compiler.is_compiling():
            return _traced_states(self.store, key_states.dtype)
        return CachedStates(self.store, 0, key_states.dtype), CachedStates(self.store, 1, key_states.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.store.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.store.reset()
        self.is_initialized = False

    def check_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"QuantizedCache: crop takes the tokens to remove as a negative number, got {tokens_to_remove}"
            )
        if tokens_to_remove:
            self.store.cropped_length(tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)
        if tokens_to_remove:
            self.store.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.store.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store.shape is not None:
            self.store.reorder(torch.arange(self.store.shape[0], device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.store.shape is not None:
            self.store.reorder(torch.arange(self.store.shape[0], device="cpu")[indices])

    def offload(self) -> None:
        """Nothing to do: the cache lives on the CPU."""

    prefetch = offload


class CachedStates(Tensor):
    """The keys or the values of a quantized layer, as transformers hands them on: any torch
    operation dequantizes them."""

    store: QuantizedKVLayer
    which: int

    @staticmethod
    def __new__(cls, store: QuantizedKVLayer, which: int, dtype: torch.dtype) -> CachedStates:
        batch, heads, length, e, ev = store.shape or (0,) * 5
        states = Tensor._make_wrapper_subclass(cls, (batch, heads, length, (e, ev)[which]), dtype=dtype)
        states.store, states.which = store, which
        return states

    def dequantize_states(self) -> Tensor:
        return self.store.values(self.dtype) if self.which else self.store.keys(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(
            CachedStates, CachedStates.dequantize_states, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _traced_states(store: QuantizedKVLayer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """CachedStates for Dynamo, which makes no tensor subclass: dequantized, and out of the compiled graph again when
    only their store is used."""
    key, value = store.keys(dtype), store.values(dtype)
    key.store = store
    return key, value


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it: ``query [B, Hq, L, E]``, ``key``, ``value [B, Hkv, S, E]``;
    returns ``[B, L, Hq, Ev]``.

    Args:
        softcap: scores become ``softcap * tanh(score / softcap)`` before they are masked (Gemma 2).
        position_bias: ``[1 or B, Hq, L, S]``, added to the scores (T5).

    Raises:
        NotImplementedError: the model asks for attention weights, or for dropout with a quantized cache.
    """
    if kwargs.get("output_attentions") or weights_are_recorded(module):
        raise NotImplementedError(
            'attn_implementation="lowbit" never holds the attention weights (output_attentions=True); use "eager"'
        )
    sink = kwargs.get("s_aux")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    store = getattr(key, "store", None)
    if store is not None and dropout:
        raise NotImplementedError("QuantizedCache: dropout must be 0, a quantized cache has no gradient")
    if (
        store is None and causal and key.shape[2] > query.shape[2]
    ):  # an empty static cache: the prompt stands at its beginning
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
    if position_bias is not None:
        attention_mask = _biased_mask(position_bias, attention_mask)
    if store is not None and softcap is None:
        out = store.attend(
            query,
            scale=scaling,
            causal=causal,
            mask=attention_mask,
            sink=sink if sink is None else sink.detach().float(),
        )
    else:
        if store is not None:  # a step over codes has no softcap
            key, value = store.keys(query.dtype), store.values(query.dtype)
            attention_mask, causal = _at_the_end(attention_mask, causal, query.shape[2], key.shape[2])
        if sink is None and softcap is None:
            out = scaled_dot_product_attention(
                query, key, value, attention_mask, dropout, causal, scaling, enable_gqa=True
            )
        else:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            sink = None if sink is None else sink.float()
            score_mod = () if softcap is None else softcap_program(float(softcap))
            out = attention(
                query,
                key,
                value,
                scale=scale,
                causal=causal,
                mask=attention_mask,
                dropout_p=dropout,
                score_mod=score_mod,
                sink=sink,
            )[0]
    return out.transpose(1, 2).contiguous(), None


def weights_are_recorded(module: torch.nn.Module) -> bool:
    """Whether a model around this call collects attention weights; not every model hands ``output_attentions`` on."""
    if _active_collector is None:
        return False
    if torch.compiler.is_dynamo_compiling() and not (_active_collector.compiling or module._forward_hooks):
        return False  # without the model around this call in the graph, Dynamo cannot look; its hooks could not either
    return any("attentions" in key for key in _active_collector.get() or ())


def _biased_mask(position_bias: Tensor, attention_mask: Tensor | None) -> Tensor:
    """One floating mask of both."""
    if attention_mask is None:
        return position_bias
    if attention_mask.dtype == torch.bool:
        return position_bias.masked_fill(~attention_mask, -torch.inf)
    return position_bias + attention_mask


def _at_the_end(mask: Tensor | None, causal: bool, q_length: int, length: int) -> tuple[Tensor | None, bool]:
    """mask and causal for queries that are the last of ``length`` tokens, not the first."""
    if not causal or q_length == length:
        return mask, causal
    seen = torch.ones(q_length, length, dtype=torch.bool, device="cpu").tril(length - q_length)[None, None]
    return seen if mask is None else mask & seen if mask.dtype == torch.bool else mask.masked_fill(
        ~seen, -torch.inf
    ), False


@functools.cache
def softcap_program(softcap: float) -> tuple[int, ...]:
    """softcap * tanh(score / softcap)"""
    program = ProgramBuilder()
    capped = program.op("tanh", program.op("mul", program.op("score"), program.constant(1.0 / softcap)))
    return tuple(program.finish(program.op("mul", capped, program.constant(softcap))))


AttentionInterface.register(NAME, lowbit_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
grow_caches_in_place(NAME)
