# SPDX-License-Identifier: Apache-2.0
"""The mask of documents that are packed into one row, without its elements.

Where position ids begin anew, a model of transformers makes a causal mask ``[1, 1, L, L]`` that keeps documents apart.
`DocumentMask` knows the lengths of the documents instead, and attention computes each document by itself: products and
memory grow with the sum of the squares of the lengths. Whatever else reads the mask gets the one of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

from lowbit.ops.tracing import is_traced

_SHORTEST = 16
"""The mean length of documents from which on a call for each pays; padding at the end counts as documents of one token."""
_OF_SHAPE = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__,
    *(of.__get__ for of in (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.is_cpu)),
}  # fmt: skip
"""What is known of a mask that is not made."""
_make_packed: Callable[..., Any] | None = getattr(masking_utils, "packed_sequence_compatibility_function", None)


class DocumentMask(Tensor):
    """A boolean mask ``[1, 1, L, L]`` whose elements are made when they are read.

    Args:
        lengths: of the documents, in their order; their sum is L.
        window: how many tokens, with itself, each token sees at most; None for no limit.
        make: makes the elements.
        device: of the mask.
    """

    lengths: list[int]
    window: int | None
    make: Callable[[], Tensor]
    made: Tensor | None

    @staticmethod
    def __new__(
        cls, lengths: list[int], window: int | None, make: Callable[[], Tensor], device: torch.device
    ) -> DocumentMask:
        shape = (1, 1, sum(lengths), sum(lengths))
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.lengths, self.window, self.make, self.made = lengths, window, make, None
        return self

    def read(self) -> Tensor:
        """Return the mask with its elements."""
        if self.made is None:
            self.made = self.make()
        return self.made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _OF_SHAPE:
                args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.read, (args, kwargs or {}))
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.read, (args, kwargs or {}))
        return func(*args, **kwargs)


def document_mask(make: Callable[..., Tensor], asked: dict[str, Any]) -> DocumentMask | None:
    """Return the mask of packed documents, or None if it is another mask that is asked for.

    Args:
        make: makes a mask from ``asked``.
        asked: the arguments of transformers' `sdpa_mask`.
    """
    plain = not asked.get("use_vmap") and asked.get("attention_mask") is None and asked["batch_size"] == 1
    found = _packed(asked.get("mask_function")) if plain and not is_traced() else None
    if found is None:
        return None
    documents, window = found
    lengths = documents[0].unique_consecutive(return_counts=True)[1].tolist()
    if documents.shape != (1, asked["q_length"]) or len(lengths) * _SHORTEST > asked["q_length"]:
        return None
    return DocumentMask(lengths, window, lambda: make(**asked), documents.device)


def _packed(function: Any) -> tuple[Tensor, int | None] | None:
    """Return the document of each token ``[B, L]`` and the window, if ``function`` is what transformers makes of a causal
    mask or one with a window, and packed documents. What it is made of is found in its closures."""
    if _make_packed is None:
        return None
    known = _both(_make_packed(causal_mask_function, torch.empty(0), torch.empty(0)))
    both = _both(function)
    if known is None or both is None or not all(map(_is_as, both, known)):
        return None
    documents, inner = (inspect.getclosurevars(each).nonlocals for each in both)
    positions = inner.get("mask_function")
    window = None
    if positions is not causal_mask_function:
        parts = _both(positions)
        if parts is None or not _is_as(parts[0], sliding_window_overlay(1)) or parts[1] is not causal_mask_function:
            return None
        window = inspect.getclosurevars(parts[0]).nonlocals["sliding_window"]
    found = documents.get("packed_sequence_mask")
    return (found, window) if isinstance(found, Tensor) else None


def _both(function: Any) -> tuple[Any, ...] | None:
    """Return the two functions of which transformers' `and_masks` made this one."""
    if not _is_as(function, and_masks(causal_mask_function)):
        return None
    parts = inspect.getclosurevars(function).nonlocals.get("mask_functions", ())
    return parts if len(parts) == 2 else None


def _is_as(function: Any, other: Any) -> bool:
    return getattr(function, "__code__", None) is other.__code__
