# SPDX-License-Identifier: Apache-2.0
"""distillation_loss: the divergence of a language model from its teacher, for quantization-aware distillation (QAD)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lowbit.quant.fused import has_hooks
from lowbit.quant.linear_kl_div import linear_kl_div
from lowbit.quant.typed_linear import PRODUCTS

_NAME = "distillation_loss"


def distillation_loss(model: nn.Module, teacher: nn.Module, *, rows: int = 256, **inputs: Any) -> Tensor:
    """Return the mean over tokens of KL(teacher || model), whose logits ``[tokens, vocabulary]`` are never all in memory.

    Of two heads that are linear layers, float or packed, `linear_kl_div` computes it, some words at a time. Other heads,
    such as those that `QATConfig` prepares, are called with ``rows`` tokens at a time.

    Trained with it in place of labels, a model prepared by `QATConfig` comes back to the float model, which was trained
    on more than the data at hand (quantization-aware distillation, arXiv 2601.20088). Gradients go to whatever is trained
    in ``model``, the output head too; ``teacher`` gets none.

    Args:
        model: a causal language model of transformers; adapters of peft may be around it.
        teacher: another one with the same vocabulary, in eval mode; often a copy of ``model`` before `quantize_`.
        rows: tokens whose logits are in memory at a time, where a head is no plain linear layer.
        inputs: what both models are called with, such as ``input_ids`` and ``attention_mask``. If there are ``labels``,
            tokens whose next label is -100 do not count; otherwise those that ``attention_mask`` hides do not.

    Raises:
        TypeError: a model has no output head.
        ValueError: the teacher is in training mode, the vocabularies differ, no token counts, or a model changes the
            logits of its head.

    Example:
        >>> teacher = copy.deepcopy(model).eval()
        >>> lowbit.quantize_(model, QATConfig(config))
        >>> distillation_loss(model, teacher, input_ids=ids).backward()
    """
    if teacher.training:
        raise ValueError(f"{_NAME}: teacher must be in eval mode, got one in training mode: call teacher.eval()")
    if rows < 1:
        raise ValueError(f"{_NAME}: rows must be positive, got {rows}")
    labels = inputs.pop("labels", None)
    with torch.no_grad():
        taught, teacher_head = _before_head("teacher", teacher, inputs)
    hidden, head = _before_head("model", model, inputs)
    counted = _counted(labels, inputs.get("attention_mask"), hidden)
    if _is_linear(head) and _is_linear(teacher_head):
        _check_vocabulary(head.out_features, teacher_head.out_features)
        stored, teacher_stored = (getattr(layer, "stored", None) for layer in (head, teacher_head))
        weights = head.weight, taught[counted], teacher_head.weight, stored, teacher_stored
        return linear_kl_div(hidden[counted], *weights, bias=head.bias, teacher_bias=teacher_head.bias)
    total = sum(
        (
            checkpoint(_divergence, head, x, teacher_head, y, use_reentrant=False)
            for x, y in zip(hidden[counted].split(rows), taught[counted].split(rows), strict=True)
        ),
        start=hidden.new_zeros((), dtype=torch.float32),
    )
    return total / counted.sum()


def _before_head(name: str, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, nn.Module]:
    """Return what a model gives to its output head, ``[B, L, H]``, and the head, which computes the last token alone."""
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is None:
        raise TypeError(
            f"{_NAME}: {name} must be a language model of transformers with an output head, got {type(model).__name__}"
        )
    seen: list[Tensor] = []

    def keep_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(args[0])
        return (args[0][:, -1:], *args[1:])

    def keep_output(module: nn.Module, args: Any, out: Tensor) -> None:
        seen.append(out)

    handles = head.register_forward_pre_hook(keep_input), head.register_forward_hook(keep_output)
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    if len(seen) != 2 or not torch.equal(logits, seen[1]):
        raise ValueError(
            f"{_NAME}: {name} must return the logits of its output head as they are; {type(model).__name__} changes them "
            "(a scale or a cap)"
        )
    return seen[0], head


def _counted(labels: Tensor | None, mask: Tensor | None, hidden: Tensor) -> Tensor:
    """Return which tokens count, ``[B, L]``."""
    if labels is not None:
        counted = functional.pad(labels, (0, 1), value=-100)[:, 1:] != -100
    elif mask is not None:
        counted = mask.bool()
    else:
        counted = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    if counted.shape != hidden.shape[:2]:
        what = "attention_mask" if labels is None else "labels"
        raise ValueError(f"{_NAME}: {what} must be {list(hidden.shape[:2])}, got {list(counted.shape)}")
    if not counted.any():
        raise ValueError(f"{_NAME}: a token must count, got labels or an attention_mask that leave none")
    return counted


def _is_linear(head: Any) -> bool:
    """Return whether a head computes the product with its weight and nothing else."""
    plain = type(head) is nn.Linear and type(head.weight) in (Tensor, nn.Parameter)
    return (plain or type(head) in PRODUCTS) and not has_hooks(head)


def _check_vocabulary(words: int, taught: int) -> None:
    if words != taught:
        raise ValueError(f"{_NAME}: teacher must have the vocabulary of the model, {words} words, got {taught}")


def _divergence(head: nn.Module, x: Tensor, teacher_head: nn.Module, y: Tensor) -> Tensor:
    """Return the sum over rows of KL(teacher || model)."""
    logits = head(x).float()
    with torch.no_grad():
        target = teacher_head(y).float()
    _check_vocabulary(logits.shape[-1], target.shape[-1])
    return functional.kl_div(logits.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="sum")
