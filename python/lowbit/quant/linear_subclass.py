# SPDX-License-Identifier: Apache-2.0
"""Subclasses of nn.Linear: which of them compute what nn.Linear does, and can be packed.

The forward of a class is tried on a copy of the layer with a small weight of random values. The copy has no hooks, and
neither the layer nor torch's random numbers change.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lowbit.quant.kinds import twin_of

_N, _K = 5, 7
_SCALES = (1e-6, 1.0, 1e6)
"""Factors of the inputs of a trial, so that a forward that clamps or rounds is found."""


def differs_from_linear(module: nn.Linear) -> str:
    """Return how a layer of a subclass of nn.Linear computes anything other than ``F.linear(x, weight, bias)``, or an
    empty string."""
    cls = type(module)
    name = f"{cls.__name__}, a subclass of nn.Linear,"
    if cls.__call__ is not nn.Module.__call__:
        return f"{name} has a call of its own"
    if cls.forward is nn.Linear.forward:
        return ""
    own = [*(key for key in module._parameters if key not in ("weight", "bias")), *module._buffers, *module._modules]
    if own:
        return f"{name} has {', '.join(own)} beside weight and bias"
    if len(inspect.signature(cls.forward).parameters) != 2:
        return f"{name} has a forward that takes more than x"
    if type(module.weight) is not nn.Parameter or not module.weight.is_floating_point():
        return f"{name} has a weight that is no plain float parameter"
    agrees = _agrees(module, torch.float64)
    if agrees is None:
        agrees = _agrees(module, module.weight.dtype)
    return "" if agrees else f"{name} has a forward that does not give F.linear(x, weight, bias)"


def lost_with(cls: type[nn.Linear]) -> str:
    """Return why a layer of a subclass of nn.Linear is only packed if it is asked for: public attributes of the class
    that a packed layer would not have. An empty string if there are none."""
    own = sorted(name for name in {*dir(cls)} - {*dir(nn.Linear)} if not name.startswith("_"))
    if not own:
        return ""
    return f"{cls.__name__}, a subclass of nn.Linear, has {', '.join(own)}, which a packed layer lacks"


def _agrees(module: nn.Linear, dtype: torch.dtype) -> bool | None:
    """Return whether a layer gives F.linear of inputs of a dtype, in training and in evaluation; None if it does not
    take the dtype."""
    random = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random, device="cpu").to(dtype)

    weight, bias = values(_N, _K), None if module._parameters.get("bias") is None else values(_N)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        for training in (True, False):
            copy = _small_copy(module, weight, bias, training)
            for x in _inputs(values):
                if not (agrees := _is_linear(copy, x, weight, bias)):
                    return agrees
    return True


def _small_copy(module: nn.Linear, weight: Tensor, bias: Tensor | None, training: bool) -> Any:
    copy: Any = twin_of(module, type(module))
    frozen = {"weight": weight.clone(), "bias": None if bias is None else bias.clone()}
    copy._parameters |= {
        key: None if value is None else nn.Parameter(value, requires_grad=False) for key, value in frozen.items()
    }
    copy.__dict__.update(in_features=_K, out_features=_N, training=training)
    return copy


def _inputs(values: Any) -> Iterator[Tensor]:
    for shape in ((_K,), (3, _K), (2, 3, _K)):
        for scale in _SCALES:
            yield values(*shape) * scale


def _is_linear(copy: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool | None:
    try:
        y = type(copy).forward(copy, x.clone())
    except Exception:  # of another's code, which may raise anything
        return None
    if not isinstance(y, Tensor):
        return False
    if y.dtype != x.dtype:
        return None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    return y.shape == exact.shape and bool(((y - exact).abs() <= 2 * _K * torch.finfo(x.dtype).eps * size).all())
