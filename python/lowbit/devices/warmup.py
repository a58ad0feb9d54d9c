# SPDX-License-Identifier: Apache-2.0
"""Warm-up calls: a device's kernels are compiled, loaded and planned on first use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def warmup(
    model: nn.Module, inputs: Iterable[Tensor | Mapping[str, Any] | Sequence[int]], *, backward: bool = False
) -> None:
    """Call a model once for each input, so that everything it runs is compiled, loaded and planned.

    Use it before the first request, or before the capture of a CUDA graph, during which none of this is possible.
    Parameters, their gradients, buffers and the state of torch's generators do not change.

    Args:
        model: a model on the device where it will run.
        inputs: one item per call: a tensor, a dict of keyword arguments, or a shape, which stands for zeros with the
            dtype and device of the model's first floating-point parameter.
        backward: whether to compute gradients of the parameters and floating-point inputs too.

    Raises:
        TypeError: an input is none of these.
        ValueError: an input is a shape, and the model has no floating-point parameter.

    Example:
        >>> lowbit.warmup(model, [(1, 4096), (512, 4096)])
        >>> lowbit.warmup(language_model, [{"input_ids": tokens}])
    """
    calls = [_arguments(model, given) for given in inputs]
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    try:
        with torch.random.fork_rng([device.index for device in devices]):
            for positional, named in calls:
                with torch.set_grad_enabled(backward):
                    result = model(*positional, **named)
                if backward:
                    _gradients(model, [*positional, *named.values()], result)
        for device in devices:
            torch.cuda.synchronize(device)
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])


def _arguments(model: nn.Module, given: Any) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, Sequence) and all(isinstance(size, int) for size in given):
        like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
        if like is None:
            raise ValueError("warmup: inputs must be tensors, as the model has no floating parameter, got a shape")
        return (torch.zeros(tuple(given), dtype=like.dtype, device=like.device),), {}
    raise TypeError(f"warmup: inputs must hold tensors, dicts of arguments or shapes, got {type(given).__name__}")


def _gradients(model: nn.Module, arguments: list[Any], result: Any) -> None:
    """Compute the gradients of a backward and discard them."""
    tensors = [tensor for tensor in [*model.parameters(), *arguments] if isinstance(tensor, Tensor)]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    outputs = [tensor for tensor in _tensors(result) if tensor.requires_grad]
    if wanted and outputs:
        zeros = [torch.zeros_like(tensor) for tensor in outputs]
        torch.autograd.grad(outputs, wanted, zeros, allow_unused=True)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = result.values()
    elif not isinstance(result, (list, tuple)):
        return []
    return [tensor for part in result for tensor in _tensors(part)]
