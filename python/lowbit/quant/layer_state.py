# SPDX-License-Identifier: Apache-2.0
"""How a float layer becomes a packed one in place, and a packed one float again, while other threads may call it.

A layer is its class and its dictionary, which two assignments replace. Between them a packed class meets the dictionary
of a float layer, never the other way round; the forward of a packed class reads ``__dict__`` once, and leaves such a
call to the float class (`float_forward`). So a call sees the float layer or the packed one as a whole.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

_Layer = TypeVar("_Layer", bound=nn.Module)
_COPIED = ("_parameters", "_buffers", "_non_persistent_buffers_set")


def twin_of(module: nn.Module, cls: type[_Layer]) -> _Layer:
    """Return an object of ``cls`` with the state of ``module``, whose parameters and buffers may be replaced without
    that ``module`` sees it."""
    twin = cls.__new__(cls)
    twin.__dict__ = module.__dict__ | {name: module.__dict__[name].copy() for name in _COPIED}
    return twin


def become_packed(module: nn.Module, twin: nn.Module) -> None:
    """Turn a float layer into the packed one that ``twin``, made of it, is; or give a packed one another weight."""
    if not isinstance(module, type(twin)):
        module.float_class = twin.float_class = type(module)
        module.__class__ = type(twin)
    module.__dict__ = twin.__dict__


def become_float(module: nn.Module, twin: nn.Module) -> None:
    """Turn a packed layer into the float one that ``twin``, made of it, is."""
    module.__dict__ = twin.__dict__
    module.__class__ = type(twin)
    module.__dict__.pop("float_class", None)


def float_forward(module: nn.Module, x: Tensor) -> Any:
    """The result of a layer that is called while it becomes packed or float."""
    cls = module.__dict__.get("float_class") or type(module)
    return cls.forward(module, x)
