# SPDX-License-Identifier: Apache-2.0
"""A key-value cache in int8 or int4, which attention reads without dequantizing it first."""

from __future__ import annotations

from torch import Tensor

from lowbit.attention.kv_layer import QuantizedKVLayer


class QuantizedKVCache:
    """The keys and values of all layers of a model. They are quantized when appended, and never dequantized as a whole.

    It takes about a quarter (int8) or an eighth (int4) of the bytes of float32. For transformers, use
    `lowbit.QuantizedCache`.

    Args:
        format: ``"int8"``: symmetric, one scale per token and kv head; or ``"int4"``: one scale per 32 elements, keys
            rotated by a Hadamard matrix.

    Raises:
        ValueError: ``format`` is neither.

    Example:
        >>> cache = lowbit.QuantizedKVCache("int8")
        >>> k = v = torch.randn(1, 8, 100, 64)
        >>> cache.append(0, k, v)
        >>> y = cache.attend(0, torch.randn(1, 32, 1, 64))
    """

    def __init__(self, format: str = "int8") -> None:
        QuantizedKVLayer(format)  # called for its check of the format
        self.format = format
        self.layers: list[QuantizedKVLayer] = []

    def layer(self, index: int) -> QuantizedKVLayer:
        """Return layer ``index``, which is created if it does not exist."""
        while len(self.layers) <= index:
            self.layers.append(QuantizedKVLayer(self.format))
        return self.layers[index]

    @property
    def length(self) -> int:
        """The number of tokens in the first layer."""
        return self.layers[0].length if self.layers else 0

    @property
    def nbytes(self) -> int:
        """The size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Quantize keys ``[B, H, L, E]`` and values ``[B, H, L, Ev]`` and append them to a layer.

        Args:
            layer: the index of the layer, which is created if it does not exist.
            key, value: the arguments of `QuantizedKVLayer.append`.

        Raises:
            ValueError: a shape does not match the cache.
            TypeError: a dtype is not supported.
        """
        self.layer(layer).append(key, value)

    def attend(self, layer: int, query: Tensor, *, scale: float | None = None, causal: bool = True, window: int = 0,
               mask: Tensor | None = None, sink: Tensor | None = None) -> Tensor:  # fmt: skip
        """Return the attention of ``query [B, Hq, L, E]`` over a layer, ``[B, Hq, L, Ev]``.

        Args:
            layer: the index of the layer.
            query, scale, causal, window, mask, sink: the arguments of `QuantizedKVLayer.attend`.

        Raises:
            ValueError: the layer is empty, or a shape does not match.
            TypeError: a dtype is not supported.
        """
        return self.layer(layer).attend(query, scale=scale, causal=causal, window=window, mask=mask, sink=sink)

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of every layer; if negative, remove that many tokens at the end.

        Raises:
            ValueError: a layer has fewer tokens.
        """
        for layer in self.layers:  # all are checked before one changes
            layer.cropped_length(length)
        for layer in self.layers:
            layer.crop(length)

    def reorder(self, index: Tensor) -> None:
        """Make batch entry i of every layer a copy of entry ``index[i]``, as in beam search.

        Args:
            index: int64 ``[new B]``.

        Raises:
            IndexError: an index is not in the batch.
        """
        for layer in self.layers:
            layer.check_reorder(index)
        for layer in self.layers:
            layer.reorder(index)
