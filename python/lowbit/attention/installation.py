# SPDX-License-Identifier: Apache-2.0
"""install() and uninstall(): run calls of torch's attention on CPU tensors by lowbit."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.bias import CausalBias

from lowbit import devices
from lowbit.attention import block_mask, compiled
from lowbit.attention.flex import flex_attention
from lowbit.attention.plain import DTYPES
from lowbit.attention.sdpa import scaled_dot_product_attention

_lock = threading.Lock()
_replaced: list[tuple[Any, str, Any]] = []
_USUAL = (Tensor.__torch_function__.__func__, None)  # inherited, or disabled as in FakeTensor (a builtin)


def install() -> None:
    """Run torch's ``flex_attention``, ``create_block_mask`` and ``scaled_dot_product_attention`` by lowbit on CPU
    tensors.

    The functions are replaced in ``torch.nn.attention.flex_attention`` and ``torch.nn.functional``, and in every module
    that has imported them by name. Tensors on other devices, and dtypes or layouts that lowbit does not support, go to
    torch as before. Graphs that torch.compile traces afterwards use lowbit too. Further calls do nothing.

    Example:
        >>> lowbit.attention.install()
        >>> torch.nn.attention.flex_attention.flex_attention(q, k, v, score_mod).sum().backward()
    """
    with _lock:
        if _replaced:
            return
        for original, ours in (
            (torch_flex.flex_attention, _routed(torch_flex.flex_attention, flex_attention, _takes_flex)),
            (
                torch_flex.create_block_mask,
                _routed(torch_flex.create_block_mask, block_mask.create_block_mask, _takes_mask),
            ),
            (F.scaled_dot_product_attention, _routed(F.scaled_dot_product_attention, _sdpa, _takes_sdpa)),
        ):
            for module in list(sys.modules.values()):
                if (getattr(module, "__name__", None) or "").partition(".")[0] == "lowbit":
                    continue
                for name, value in list((getattr(module, "__dict__", None) or {}).items()):
                    if value is original:
                        _replaced.append((module, name, original))
                        setattr(module, name, ours)
        compiled.take_flex_op()
        compiled.everything = True


def uninstall() -> None:
    """Restore torch's functions everywhere."""
    with _lock:
        for module, name, original in _replaced:
            setattr(module, name, original)
        compiled.everything = False
        _replaced.clear()


def installed() -> bool:
    """Whether calls of torch's attention run by lowbit."""
    return bool(_replaced)


def _routed(original: Callable[..., Any], ours: Callable[..., Any], takes: Callable[..., bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def route(*args: Any, **kwargs: Any) -> Any:
        return (ours if takes(*args, **kwargs) else original)(*args, **kwargs)

    builtin = torch.jit._builtins._find_builtin(original)
    if builtin is not None:  # TorchScript identifies torch's function by its id, and keeps calling it
        torch.jit._builtins._register_builtin(route, builtin)
    return route


class _Refused(RuntimeError, ValueError):
    """An error for callers of either of torch's: the function raises RuntimeError, CausalBias ValueError."""


def _sdpa(*args: Any, **kwargs: Any) -> Tensor:
    """Call lowbit's function, and raise errors of torch's type."""
    try:
        return scaled_dot_product_attention(*args, **kwargs)
    except (ValueError, TypeError) as error:
        raise _Refused(str(error)) from error


def _takes_flex(query: Any, *args: Any, **kwargs: Any) -> bool:
    return isinstance(query, Tensor) and devices.has_kernels(query.device)


def _takes_mask(
    mask_mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None, *args: Any, **kwargs: Any
) -> bool:
    if device is None:  # torch's default device; a CUDA build without a GPU would name cuda
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return torch.device(device).type == "cpu"


def _takes_sdpa(
    query: Any, key: Any = None, value: Any = None, attn_mask: Any = None, *args: Any, **kwargs: Any
) -> bool:
    return (
        isinstance(query, Tensor)
        and devices.has_kernels(query.device)
        and not query.is_nested
        and query.dtype in DTYPES
        and all(_is_like_tensor(argument) for argument in (query, key, value, attn_mask) if argument is not None)
    )


def _is_like_tensor(argument: Any) -> bool:
    """Whether the argument has no ``__torch_function__`` of its own that torch's function would call."""
    kind = type(argument)
    if kind is Tensor or kind is Parameter or kind is CausalBias:
        return True
    return isinstance(argument, Tensor) and getattr(kind.__torch_function__, "__func__", None) in _USUAL
