# SPDX-License-Identifier: Apache-2.0
"""QuantizedCache: a transformers cache in int8 or int4, to be passed as ``past_key_values``.

With ``attn_implementation="lowbit"``, attention multiplies its codes directly. Any other implementation gets
dequantized keys and values.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.cache_utils import QuantizedCache as TransformersQuantizedCache

from lowbit.attention.kv_layer import QuantizedKVLayer
from lowbit.ops.tracing import is_traced


class QuantizedCache(Cache):
    """A transformers cache in int8 or int4: the ``past_key_values`` of any decoder with full attention.

    Attention within the first prompt uses the float keys and values. They are quantized for the tokens that follow.

    Args:
        format: ``"int8"`` or ``"int4"``, as in `lowbit.QuantizedKVCache`.

    Raises:
        ValueError: ``format`` is neither.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="lowbit")
        >>> model.generate(ids, past_key_values=lowbit.QuantizedCache("int8"), max_new_tokens=20)
    """

    def __init__(self, format: str = "int8") -> None:
        QuantizedKVLayer(format)  # called for its check of the format
        self.format = format
        super().__init__(layer_class_to_replicate=lambda *_, **__: _Layer(format))

    @property
    def nbytes(self) -> int:
        """Return the size of all layers in bytes."""
        return sum(layer.store.nbytes for layer in self.layers)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens.

        Raises:
            ValueError: ``tokens_to_remove`` is positive, or a layer holds fewer tokens. No layer is changed then.
        """
        for layer in self.layers:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)


class _Layer(CacheLayerMixin):
    """The layer interface of transformers on top of a QuantizedKVLayer."""

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
                "QuantizedCache: crop must get the number of tokens to remove as a negative number, got "
                f"{tokens_to_remove}"
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
        """Do nothing: the cache is on the CPU."""

    prefetch = offload


class CachedStates(Tensor):
    """The keys or values of a quantized layer, in the form that transformers passes on. Any torch operation dequantizes
    them."""

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
    """Return keys and values for Dynamo, which cannot create the tensor subclass. They are dequantized; the compiler
    removes this again if only their store is used."""
    key, value = store.keys(dtype), store.values(dtype)
    key.store = store
    return key, value


_FORMATS = {None: "int4", 4: "int4", 8: "int8"}
"""By transformers' ``nbits``."""


def serve_quantized_caches(implementation: str) -> None:
    """Let ``generate(cache_implementation="quantized")`` make a `QuantizedCache` for a model with this attention: with
    4 bits, or as many as ``cache_config={"nbits": 8}`` says. One that ``cache_config`` asks more of, such as another
    backend, stays transformers' own.

    transformers has no hook here: ``generate`` makes its class by name, with backends that other packages have.
    """
    make = TransformersQuantizedCache.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_ours(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = signature.bind(self, *args, **kwargs).arguments
        config = asked["config"].get_text_config(decoder=True)
        if config._attn_implementation != implementation:
            make(self, *args, **kwargs)
            return
        options = {name for name, value in asked.items() if value is not None} - {"self", "backend", "config", "nbits"}
        has_windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        format = _FORMATS.get(asked.get("nbits"))
        if asked["backend"] == "quanto" and format is not None and not options and not has_windows:
            self.__class__ = QuantizedCache
            QuantizedCache.__init__(self, format)
            return
        try:
            make(self, *args, **kwargs)
        except ImportError as error:
            raise ImportError(
                f'{error}\nWith attn_implementation="{implementation}", cache_config={{"nbits": 4}} or 8 alone makes a '
                'lowbit.QuantizedCache, which needs no other package; so does past_key_values=lowbit.QuantizedCache("int8")'
            ) from error

    TransformersQuantizedCache.__init__ = make_ours
