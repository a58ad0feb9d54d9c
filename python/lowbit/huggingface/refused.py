# SPDX-License-Identifier: Apache-2.0
"""Refuse packed layers in functions of other packages that read the weight of every nn.Linear as a float one.

Called with a model that has packed layers, such a function raises an error that names these layers. Functions are
wrapped once, when their package is imported (when_imported.py); models without packed layers are not affected.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import nn

Reads = Callable[[str, nn.Module, Mapping[str, Any]], bool]
"""Whether the function reads the weight of a packed layer, given the name of the layer, the layer, and the function's
arguments by name."""


def refuse_packed_layers(home: ModuleType, function: str, reads: Reads, instead: str) -> None:
    """Wrap a function whose first argument is a model, everywhere its package refers to it, unless this was done
    before.

    Args:
        home: the module that defines it.
        function: its name.
        reads: tells which packed layers' weights it reads.
        instead: the advice in the error.
    """
    original = getattr(home, function)
    if hasattr(original, "_before_lowbit"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        packed = sys.modules.get("lowbit.quant.quant_linear")  # None in programs without packed layers
        if packed is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        model = next(iter(bound.arguments.values()))
        given = {**bound.arguments, **bound.kwargs}  # with the names in **kwargs
        for name, module in model.named_modules():
            if isinstance(module, packed.QuantLinear) and reads(name, module, given):
                raise ValueError(
                    f"{function}: the weights of linear layers must be float, got {name or 'the model'} as "
                    f"{module.spec.name}; {instead}"
                )
        return original(*args, **kwargs)

    checked._before_lowbit = original  # type: ignore[attr-defined]
    package = home.__name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package and vars(module).get(function) is original:
            setattr(module, function, checked)
