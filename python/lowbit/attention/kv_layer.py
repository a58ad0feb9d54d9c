# SPDX-License-Identifier: Apache-2.0
"""The keys and values of one attention layer as codes. A QuantizedKVCache has one object per layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit import devices
from lowbit.ops.forward_mode import refuse_tangents
from lowbit.ops.registration import function_of, register
from lowbit.ops.tracing import is_traced

register()

FORMATS = ("int8", "int4")
_GROUP = 32  # rows are padded to a multiple; int4 has one scale per group
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_decode = function_of("decode")
_quantize = function_of("kv_quantize_")
_dequantize = function_of("kv_dequantize_")


class QuantizedKVLayer:
    """The keys and values of one layer, quantized per token and kv head.

    int8 has codes within +-127 and one float32 scale per token and head. int4 has one float16 scale per 32 elements,
    and keys are rotated by a Hadamard matrix. Storage is ``[B, H, capacity, bytes]``; its capacity doubles when it is
    full.

    Args:
        format: ``"int8"`` or ``"int4"``.

    Raises:
        ValueError: ``format`` is neither.
    """

    def __init__(self, format: str = "int8") -> None:
        if format not in FORMATS:
            raise ValueError(f"QuantizedKVLayer: format must be int8 or int4, got {format!r}")
        self.format = format
        self.length = 0
        self._k: _Rows | None = None
        self._v: _Rows | None = None

    @property
    def rotated(self) -> bool:
        """Whether keys are stored rotated, so that queries are rotated too."""
        return self.format == "int4"

    @property
    def shape(self) -> tuple[int, int, int, int, int] | None:
        """The sizes B, kv heads, length, E, Ev; None before the first append."""
        return (
            None
            if self._k is None or self._v is None
            else (*self._k.codes.shape[:2], self.length, self._k.columns, self._v.columns)
        )

    @property
    def nbytes(self) -> int:
        """The size of the storage in bytes, including spare capacity."""
        return sum(rows.codes.nbytes + rows.scale.nbytes for rows in (self._k, self._v) if rows is not None)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Quantize keys ``[B, H, L, E]`` and values ``[B, H, L, Ev]`` and append them.

        Args:
            key: float32, bfloat16 or float16.
            value: float32, bfloat16 or float16.

        Raises:
            ValueError: a shape does not match the cache.
            TypeError: a dtype is not float32, bfloat16 or float16.
            NotImplementedError: a tensor has a forward-mode tangent.
        """
        self._check_append(key, value)
        if forward_ad._current_level >= 0:  # -1 outside of forward mode
            refuse_tangents("QuantizedKVCache", (key, value))
        key, value = (
            tensor.detach() if tensor.stride(-1) == 1 else tensor.detach().contiguous() for tensor in (key, value)
        )
        batch, heads, length, _ = key.shape
        k, v = self._k, self._v
        if k is None or v is None:
            k = _Rows.empty(self.format, batch, heads, length, key)
            v = _Rows.empty(self.format, batch, heads, length, value)
        end = self.length + length
        if end > k.codes.shape[2]:
            k, v = k.grown(self.length, end), v.grown(self.length, end)
        _quantize(key, k.codes, k.scale, self.rotated, self.length)
        _quantize(value, v.codes, v.scale, False, self.length)
        # Autograd does not see the kernels' writes, but a graph that saved a part of the cache must detect them.
        torch.autograd.graph.increment_version((k.codes, k.scale, v.codes, v.scale))
        self._k, self._v, self.length = k, v, end  # only now, so that an error above leaves the cache unchanged

    def _check_append(self, key: Tensor, value: Tensor) -> None:
        for name, tensor in (("key", key), ("value", value)):
            if tensor.dim() != 4:
                raise ValueError(f"QuantizedKVCache: {name} must have shape [B, H, L, E], got {list(tensor.shape)}")
            devices.check("QuantizedKVCache", name, tensor.device, kernel="kv_quantize")
            if tensor.dtype not in _DTYPES:
                raise TypeError(f"QuantizedKVCache: {name} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"QuantizedKVCache: value must have batch, heads and length of key, got {list(value.shape)} and "
                f"{list(key.shape)}"
            )
        if self.shape is not None:
            batch, heads, _, e, ev = self.shape
            if (*key.shape[:2], key.shape[-1], value.shape[-1]) != (batch, heads, e, ev):
                raise ValueError(
                    f"QuantizedKVCache: key and value must be [{batch}, {heads}, L, {e}] and [{batch}, {heads}, L, "
                    f"{ev}] as those in the cache, "
                    f"got {list(key.shape)} and {list(value.shape)}"
                )

    def attend(
        self,
        query: Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        window: int = 0,
        mask: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of ``query [B, Hq, L, E]`` over the cache: ``[B, Hq, L, Ev]``.

        A few queries are multiplied by the codes directly; many queries (a prompt) by dequantized tiles. The inputs are
        detached: no gradient passes through a cache.

        Args:
            query: float32, bfloat16 or float16; the queries of the last L tokens in the cache.
            scale: the factor of the scores, by default 1 / sqrt(E).
            causal: whether query i, at position length - L + i, sees only keys up to its position.
            window: if positive, the number W of keys that a query sees: its own and the W - 1 before it, as in
                `masks.sliding_window(W)` and transformers' sliding_window.
            mask: bool (True: visible) or floating point (added), broadcastable to ``[B, Hq, L, length]``.
            sink: float32 ``[Hq]``, an additional score per head, which has no value.

        Raises:
            ValueError: the cache is empty, or a shape does not match.
            TypeError: a dtype is not supported.
            NotImplementedError: a tensor has a forward-mode tangent.
        """
        if self.shape is None or self._k is None or self._v is None:
            raise ValueError(
                "QuantizedKVCache: the cache must hold tokens before attend, got an empty one: append first"
            )
        batch, heads, length, e, ev = self.shape
        group = query.shape[1] // max(1, heads) if query.dim() == 4 else 0
        if query.dim() != 4 or query.shape[0] != batch or query.shape[3] != e or query.shape[1] != group * heads:
            raise ValueError(
                f"QuantizedKVCache: query must be [{batch}, a multiple of {heads}, L, {e}], got {list(query.shape)}"
            )
        if forward_ad._current_level >= 0:  # -1 outside of forward mode
            refuse_tangents("QuantizedKVCache", (query, mask, sink))
        query = query.detach() if query.requires_grad else query
        scale = 1 / math.sqrt(e) if scale is None else float(scale)
        if mask is not None:
            mask = mask.detach()[(None,) * (4 - mask.dim())]
        if sink is not None:
            sink = sink.detach()
        k, v, position = self._k, self._v, length - query.shape[2]
        return _decode(
            query, k.codes, v.codes, scale, k.scale, v.scale, self.rotated, causal, position, window, ev, mask, sink,
            length,
        )  # fmt: skip

    def keys(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantized keys, ``[B, H, length, E]``."""
        return self._decoded(0, dtype)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantized values, ``[B, H, length, Ev]``."""
        return self._decoded(1, dtype)

    def _decoded(self, which: int, dtype: torch.dtype) -> Tensor:
        rows, rotated = ((self._k, self.rotated), (self._v, False))[which]
        if rows is None:
            raise ValueError(
                "QuantizedKVCache: the cache must hold tokens before they are read, got an empty one: append first"
            )
        codes, scale = rows.part(0, self.length)
        result = torch.empty(*codes.shape[:3], rows.columns, dtype=dtype, device=codes.device)
        _dequantize(codes, scale, result, rotated)
        return result

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens; if negative, remove that many tokens at the end.

        Raises:
            ValueError: the cache has fewer tokens.
        """
        self.length = self.cropped_length(length)

    def cropped_length(self, length: int) -> int:
        """Return how many tokens `crop` would keep.

        Raises:
            ValueError: the cache has fewer tokens.
        """
        wanted = self.length + length if length < 0 else length
        if not 0 <= wanted <= self.length:
            raise ValueError(f"QuantizedKVCache: crop must keep 0 to {self.length} tokens, got {length}")
        return wanted

    def check_reorder(self, index: Tensor) -> None:
        """Check the argument of `reorder`.

        Raises:
            IndexError: an index is not in the batch.
        """
        if (
            self._k is None or index.numel() == 0 or is_traced()
        ):  # a graph cannot read values; there the copy raises the error
            return
        if not (int(index.min()) >= 0 and int(index.max()) < self._k.codes.shape[0]):
            raise IndexError(
                f"QuantizedKVCache: reorder must name entries 0 to {self._k.codes.shape[0] - 1}, got {index.tolist()}"
            )

    def reorder(self, index: Tensor) -> None:
        """Make batch entry i a copy of entry ``index[i]``; there may be any number of indices, in any order.

        Args:
            index: int64 ``[new B]``.

        Raises:
            IndexError: an index is not in the batch.
        """
        self.check_reorder(index)
        if self._k is not None and self._v is not None:
            self._k, self._v = self._k.selected(index, self.length), self._v.selected(index, self.length)

    def reset(self) -> None:
        """Forget all tokens and their shapes."""
        self.length, self._k, self._v = 0, None, None


class _Rows:
    """The codes and scales of keys or of values."""

    __slots__ = ("codes", "columns", "scale")

    def __init__(self, codes: Tensor, scale: Tensor, columns: int) -> None:
        self.codes, self.scale, self.columns = codes, scale, columns

    @staticmethod
    def empty(format: str, batch: int, heads: int, capacity: int, like: Tensor) -> _Rows:
        columns = like.shape[-1]
        padded = -(-columns // _GROUP) * _GROUP
        int4 = format == "int4"
        codes = like.new_empty(
            batch, heads, capacity, padded // 2 if int4 else padded, dtype=torch.uint8 if int4 else torch.int8
        )
        scale = like.new_empty(
            batch, heads, capacity, padded // _GROUP if int4 else 1, dtype=torch.float16 if int4 else torch.float32
        )
        return _Rows(codes, scale, columns)

    def part(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        return self.codes[:, :, begin:end], self.scale[:, :, begin:end]

    def grown(self, length: int, needed: int) -> _Rows:
        capacity = max(needed, 2 * self.codes.shape[2], 256)
        grown = []
        for old in (self.codes, self.scale):
            grown.append(old.new_empty(*old.shape[:2], capacity, old.shape[3]))
            grown[-1][:, :, :length] = old[:, :, :length]
        return _Rows(grown[0], grown[1], self.columns)

    def selected(self, index: Tensor, length: int) -> _Rows:
        codes, scale = self.part(0, length)
        return _Rows(codes.index_select(0, index), scale.index_select(0, index), self.columns)
