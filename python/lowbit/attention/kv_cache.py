# SPDX-License-Identifier: Apache-2.0
"""A key-value cache in int8 or int4 that attention reads without decoding it first."""

from __future__ import annotations

from torch import Tensor

from lowbit.attention.kv_layer import QuantizedKVLayer


class QuantizedKVCache:
    """Keys and values of all layers of a model, quantized when they are appended and never dequantized as a whole.

    A quarter (int8) or an eighth (int4) of float32. For transformers:
    `lowbit.QuantizedCache`.

    Args:
        format: ``"int8"``: symmetric, one scale per token and kv head; or ``"int4"``: one scale per 32 elements, keys
            rotated by a Hadamard matrix.

    Example:
        >>> cache = lowbit.QuantizedKVCache("int8")
        >>> k = v = torch.randn(1, 8, 100, 64)
        >>> cache.append(0, k, v)
        >>> y = cache.attend(0, torch.randn(1, 32, 1, 64))

    Raises:
        ValueError: the format is another one.
    """

    def __init__(self, format: str = "int8") -> None:
        QuantizedKVLayer(format)  # checks the format
        self.format = format
        self.layers: list[QuantizedKVLayer] = []

    def layer(self, index: int) -> QuantizedKVLayer:
        """Return layer ``index``, made if it is not there yet."""
        while len(self.layers) <= index:
            self.layers.append(QuantizedKVLayer(self.format))
        return self.layers[index]

    @property
    def length(self) -> int:
        """Tokens in the first layer."""
        return self.layers[0].length if self.layers else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Quantize keys ``[B, H, L, E]`` and values ``[B, H, L, Ev]`` of a layer behind the stored ones.

        Args:
            layer: number of the layer; one that is not there yet is made.
            key, value: the arguments of `QuantizedKVLayer.append`.

        Raises:
            ValueError, TypeError: a shape or dtype does not fit.
        """
        self.layer(layer).append(key, value)

    def attend(self, layer: int, query: Tensor, *, scale: float | None = None, causal: bool = True, window: int = 0,
               mask: Tensor | None = None, sink: Tensor | None = None) -> Tensor:  # fmt: skip
        """Return the attention of ``query [B, Hq, L, E]`` over a layer, ``[B, Hq, L, Ev]``.

        Args:
            layer: number of the layer.
            query, scale, causal, window, mask, sink: the arguments of `QuantizedKVLayer.attend`.

        Raises:
            ValueError, TypeError: the layer is empty, or a shape or dtype does not fit.
        """
        return self.layer(layer).attend(query, scale=scale, causal=causal, window=window, mask=mask, sink=sink)

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of every layer; a negative number says how many to remove.

        Raises:
            ValueError: a layer holds fewer.
        """
        for layer in self.layers:  # all are asked before one is changed
            layer.cropped_length(length)
        for layer in self.layers:
            layer.crop(length)

    def reorder(self, index: Tensor) -> None:
        """Make batch entry i of every layer a copy of ``index[i]`` (int64): beam search.

        Args:
            index: ``[new B]``.

        Raises:
            IndexError: an entry is not in the batch.
        """
        for layer in self.layers:
            layer.check_reorder(index)
        for layer in self.layers:
            layer.reorder(index)
