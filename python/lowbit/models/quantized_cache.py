# SPDX-License-Identifier: Apache-2.0
"""QuantizedCache: a cache of transformers in int8 or int4, as ``past_key_values``.

It works with every attention implementation (another one is given dequantized keys and values); with "lowbit" its codes
are multiplied directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from lowbit.attention.kv_layer import QuantizedKVLayer
from lowbit.ops.tracing import is_traced


class QuantizedCache(Cache):
    """A transformers cache in int8 or int4: ``past_key_values`` of any decoder with full attention.

    The first prompt is attended to in float, as it is at hand; it is quantized for the tokens after it.

    Args:
        format: ``"int8"`` or ``"int4"``, as in `lowbit.QuantizedKVCache`.

    Raises:
        ValueError: the format is another one.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="lowbit")
        >>> model.generate(ids, past_key_values=lowbit.QuantizedCache("int8"), max_new_tokens=20)
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
        if is_traced():
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
