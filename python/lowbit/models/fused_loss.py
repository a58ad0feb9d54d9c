# SPDX-License-Identifier: Apache-2.0
"""fuse_loss: a language model of transformers whose loss needs no logits.

Such a model computes ``logits = lm_head(hidden)`` and ``loss = self.loss_function(logits, labels, ...)``. `fuse_loss`
makes the head return `DeferredLogits`, which know hidden states and head. The loss function computes the loss from these
with linear_cross_entropy. Whatever else is done to the logits, by the model or by a caller, makes them first, as the
head would have; so a model that scales or caps its logits has the right loss, and the logits in memory.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from lowbit.ops.derivatives import is_recorded
from lowbit.ops.tracing import is_traced
from lowbit.quant.functional import linear_cross_entropy
from lowbit.quant.kinds import stored_weight
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.typed_linear import PRODUCTS

_OF_SHAPE = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__,
    *(of.__get__ for of in (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.layout, Tensor.is_cpu)),
}  # fmt: skip
"""What is known of logits that are not made."""


class DeferredLogits(Tensor):
    """Logits that are made when they are first read.

    Args:
        head: the output head.
        x: its input.
        dtype: the dtype of the logits.
    """

    head: nn.Module
    x: Tensor
    made: Tensor | None
    autocast: tuple[bool, torch.dtype]

    @staticmethod
    def __new__(cls, head: Any, x: Tensor, dtype: torch.dtype) -> DeferredLogits:
        shape = (*x.shape[:-1], head.out_features)
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=x.device, requires_grad=True)
        self.head, self.x, self.made = head, x, None
        self.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        return self

    def read(self) -> Tensor:
        """Return the logits, with their gradient."""
        if self.made is None:
            enabled, dtype = self.autocast
            with torch.enable_grad(), torch.autocast(self.x.device.type, dtype, enabled):
                self.made = type(self.head).forward(self.head, self.x).to(self.dtype)
        return self.made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_SHAPE:
                return func(*args, **kwargs or {})
            if func is Tensor.float and args[0].made is None:  # accelerate casts all outputs under autocast
                cast = cls(args[0].head, args[0].x, torch.float32)
                cast.autocast = args[0].autocast
                return cast
            args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.read, (args, kwargs or {}))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(  # autograd has passed, so the gradient of the logits would be lost
            f"fuse_loss: {func} must be called from Python on logits that a loss may be made of, not by C++; read them "
            "first: logits.clone()"
        )


def _is_served(head: nn.Module) -> bool:
    return type(head) in (nn.Linear, *PRODUCTS)


def forward(self: Any, x: Tensor) -> Tensor:
    """The forward of the head: deferred where a gradient is wanted, which is where a loss is."""
    if not _is_served(self) or not x.is_cpu or is_traced() or not is_recorded((x, self.weight, self.bias)):
        return type(self).forward(self, x)
    return DeferredLogits(self, x, torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype)


class FusedLoss:
    """ForCausalLMLoss of logits, or of what they would be made of."""

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if type(logits) is not DeferredLogits or logits.made is not None or vocab_size != logits.shape[-1]:
            return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **others)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        head: Any = logits.head
        stored = head.stored if isinstance(head, QuantLinear) else None
        enabled, dtype = logits.autocast
        x = logits.x.to(dtype) if enabled else logits.x
        total = linear_cross_entropy(
            x, stored_weight(head), shift_labels.contiguous(), stored, head.bias,
            reduction="mean" if num_items_in_batch is None else "sum", ignore_index=ignore_index,
        )  # fmt: skip
        return total if num_items_in_batch is None else total / num_items_in_batch


def fuse_loss(model: Any) -> Any:
    """Make a language model of transformers compute its loss without logits in memory, in place.

    ``model(..., labels=labels).loss`` comes from `linear_cross_entropy`, with the gradients of hidden states and, if it
    is trained, of the head. Logits are made only if something reads them: ``outputs.logits``, metrics, a model that
    scales or caps its logits (Gemma 2, Granite, Cohere), whose loss is then computed as before. Without gradients, on
    other devices than the CPU and under torch.compile nothing changes, nor do other models.

    Args:
        model: a causal language model with a packed or float output head; adapters of peft may be around it.

    Returns:
        The model.

    Raises:
        TypeError: the model is not one of transformers with an output head.
        ValueError: its loss is not that of causal language models, or its head is of another kind.

    Example:
        >>> lowbit.fuse_loss(model)
        >>> Trainer(model, args, train_dataset=data).train()
    """
    find: Callable[[], Any] | None = getattr(model, "get_base_model", None)
    base = find() if callable(find) else model
    head = base.get_output_embeddings() if hasattr(base, "loss_function") else None
    head = getattr(head, "base_layer", head)
    if head is None:
        raise TypeError(
            f"fuse_loss: model must be a language model of transformers with an output head, got {type(base).__name__}"
        )
    if isinstance(base.loss_function, FusedLoss):
        return model
    if base.loss_function is not ForCausalLMLoss:
        name = getattr(base.loss_function, "__name__", type(base.loss_function).__name__)
        raise ValueError(f"fuse_loss: the loss of the model must be ForCausalLMLoss, got {name}")
    if not _is_served(head) or "forward" in vars(head):
        raise ValueError(
            f"fuse_loss: the output head must be an nn.Linear or QuantLinear with its own forward, got "
            f"{type(head).__name__}"
        )
    head.forward = types.MethodType(forward, head)
    base.loss_function = FusedLoss()
    return model
