# SPDX-License-Identifier: Apache-2.0
"""Checks of the options and parameters of a param group, with torch's messages for the checks that torch has too."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit import devices
from lowbit._C import STATE_FORMATS
from lowbit.ops.packed_weights import WAYS_TO_TRAIN, were_replaced
from lowbit.optim import sharding

_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_BLOCK, _MAX_BLOCK = 32, 4096
LARGEST_SEED = 2**63 - 1
MASTERS = (None, "bf16+8")


def check_number(value: Any, what: str, *, signed: bool = False, below: float = math.inf) -> None:
    """Raise ValueError unless ``value`` is a number (or a tensor with one element), is not negative (unless
    ``signed``), and is less than ``below``."""
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not value.is_complex() and value.device.type != "meta"
    else:
        is_number = isinstance(value, Real)
    smallest = -math.inf if signed else 0.0
    if not is_number or not smallest <= value or (below < math.inf and value >= below):
        raise ValueError(f"Invalid {what}: {value}")


def check_switch(value: Any, name: str) -> None:
    """Raise ValueError unless ``value`` is True or False (or 1 or 0)."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"Invalid {name} value: {value!r}, must be True or False")


def check_group(group: dict[str, Any]) -> None:
    """Raise ValueError if an option that all rules share is out of range."""
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    check_number(group["lr"], "learning rate")
    check_number(group["weight_decay"], "weight_decay value")
    if "betas" in group:
        _check_betas(group["betas"])
    for name in ("maximize", "bf16_stochastic_round"):
        check_switch(group[name], name)
    if group["master"] not in MASTERS:
        raise ValueError(f"Invalid master value: {group['master']!r}, must be one of {', '.join(map(repr, MASTERS))}")
    if group["master"] and group["bf16_stochastic_round"]:
        raise ValueError(
            f"Invalid bf16_stochastic_round value: True, must be False with master={group['master']!r}, which keeps "
            "what rounding cuts off"
        )
    for name, largest in (("min_8bit_size", None), ("rounding_seed", LARGEST_SEED)):
        value = group[name]
        if not isinstance(value, int) or value < 0 or (largest is not None and value > largest):
            raise ValueError(f"Invalid {name} value: {value}")
    if not isinstance(group["state_format"], str) or group["state_format"] not in STATE_FORMATS:
        raise ValueError(
            f"Invalid state_format value: {group['state_format']!r}, must be one of {', '.join(STATE_FORMATS)}"
        )
    block_size = group["block_size"]
    if not isinstance(block_size, int) or not _MIN_BLOCK <= block_size <= _MAX_BLOCK or block_size & (block_size - 1):
        raise ValueError(
            f"Invalid block_size value: {block_size}, must be a power of two from {_MIN_BLOCK} to {_MAX_BLOCK}"
        )


def _check_betas(betas: Any) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"Invalid betas value: {betas}, must be two numbers")
    for index, beta in enumerate(betas):
        check_number(beta, f"beta parameter at index {index}", below=1.0)


def check_param(param: Tensor, optimizer: str, master: str | None) -> None:
    """Raise ValueError if the optimizers do not support a parameter."""
    devices.check(optimizer, "parameters", param.device, kernel="optim_step")
    if param.dtype not in _PARAM_DTYPES:
        raise ValueError(f"{optimizer}: parameters must be float32, bfloat16 or float16, got {param.dtype}")
    if param.layout is not torch.strided:
        raise ValueError(f"{optimizer}: parameters must be dense tensors, got {param.layout}")
    if master and (param.dtype == torch.float16 or is_traceable_wrapper_subclass(sharding.local(param))):
        raise ValueError(
            f"{optimizer}: parameters must be bfloat16 (or float32, which need no correction) with master={master!r}, "
            f"got {type(param.data).__name__} of {param.dtype}"
        )
    if _overlaps(param):
        raise ValueError(
            f"{optimizer}: the elements of a parameter must not share memory (an expanded tensor), got shape "
            f"{list(param.shape)} with strides {list(param.stride())}"
        )


def check_trainable(params: list[Tensor], optimizer: str) -> None:
    """Raise ValueError where none of the parameters trains, and some are codes, such as packed weights."""
    codes = [param for param in params if not param.is_floating_point() and not param.is_complex()]
    if codes and not any(param.requires_grad for param in params):
        raise ValueError(
            f"{optimizer}: a parameter must require a gradient, got {len(params)} that do not, {len(codes)} of them "
            f"codes (packed weights), the first {codes[0].dtype} of shape {list(codes[0].shape)}; {WAYS_TO_TRAIN}"
        )


def check_not_replaced(params: list[Tensor], optimizer: str) -> None:
    """Raise ValueError for a parameter that would train, without a gradient since its layer was packed."""
    replaced = were_replaced([param for param in params if param.requires_grad and param.grad is None])
    if replaced:
        raise ValueError(
            f"{optimizer}: parameters must be those of the model, got {len(replaced)} of {len(params)} whose layers "
            f"were packed since, by quantize_ or another function, the first of shape {list(replaced[0].shape)}: make "
            f"the optimizer after that, of parameters that train; {WAYS_TO_TRAIN}"
        )


def _overlaps(tensor: Tensor) -> bool:
    """Return whether two elements may share memory: whether a stride is smaller than the extent of the dimensions
    inside it."""
    if tensor.is_contiguous():
        return False
    reach = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False
