# SPDX-License-Identifier: Apache-2.0
"""Functions of other packages that take the weight of every nn.Linear for a float one: called with a model that has
packed layers, they raise an error that names these layers. They are wrapped once, when their package is imported
(when_imported.py); models without packed layers pass through unchanged."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import nn

Reads = Callable[[str, nn.Module, Mapping[str, Any]], bool]
"""Of the name of a packed layer, the layer and the arguments of the function by name: whether it reads the weight."""


def refuse_packed_layers(home: ModuleType, function: str, reads: Reads, instead: str) -> None:
    """Wrap a function of ``home`` whose first argument is a model, wherever its package has it by now; once.

    Args:
        home: the module that defines it.
        function: its name.
        reads: the packed layers whose weight it reads.
        instead: the advice in the error.
    """
    original = getattr(home, function)
    if hasattr(original, "_before_lowbit"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        packed = sys.modules.get("lowbit.quant.quant_linear")  # programs without packed layers need not import it
        if packed is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        model = next(iter(bound.arguments.values()))
        given = {**bound.arguments, **bound.kwargs}  # those of **kwargs by their own names too
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
