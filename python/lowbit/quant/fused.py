# SPDX-License-Identifier: Apache-2.0
"""The base of modules that `lowbit.fuse` made faster: their class changes in place and can change back, and where a
call is more than plain inference they compute as before."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from lowbit.ops.tracing import is_traced
from lowbit.tables.folding import LayerNames, told

_is_grad_enabled = torch.is_grad_enabled
_is_transformed = torch._C._are_functorch_transforms_active
_is_autocast_enabled = torch.is_autocast_enabled
_taking = threading.Lock()


class Fused(nn.Module):
    """A piece of a model with a forward of ours; ``super().forward`` is the one that it had."""

    prefix: ClassVar[str] = "Fused"
    """Of the name of the class."""
    piece: ClassVar[type[Fused]]
    unfused: ClassVar[type[nn.Module]]
    facts: dict[str, Any]
    """Facts about the module, found when it was fused."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, where neither pickle nor copy would find it.
        return _unset, (self.piece, self.unfused), self.__dict__

    @classmethod
    def take(cls, module: nn.Module, facts: dict[str, Any]) -> None:
        """Fuse ``module`` in place: other owners of it, its hooks and its name stay valid. The change of class is all
        of it, so that a thread that calls the module, or an interrupt, meets the one or the other. A module that
        another thread has fused in the meantime stays as that one made it."""
        with _taking:
            if not isinstance(module, Fused):
                module.facts = facts
                module.__class__ = _class_of(cls, type(module))

    def give_back(self) -> None:
        """Turn the module back into its former class. A call that another thread has begun and not ended meets neither
        its facts nor its methods: `_forward_of` begins it again."""
        self.__class__ = self.unfused
        del self.facts


class FusedModules(LayerNames):
    """Names of the modules that were fused; prints one line for those of a kind.

    Attributes:
        left: names of pieces that stay as they are, each with the reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}

    def __repr__(self) -> str:
        reasons = dict.fromkeys(self.left.values())
        left = {reason: told([name for name in self.left if self.left[name] == reason]) for reason in reasons}
        return "\n".join([super().__repr__(), *(f"left: {names}: {reason}" for reason, names in left.items())])


def unfuse(model: nn.Module) -> None:
    """Turn every fused piece of ``model`` back into the class that it was."""
    for module in model.modules():
        if isinstance(module, Fused):
            module.give_back()


@functools.cache
def _class_of(piece: type[Fused], unfused: type[nn.Module]) -> type[Fused]:
    """A subclass of both: code that asks for the original class still finds it, as transformers does to record
    outputs, also by the text of the class."""
    entries = {name: getattr(unfused, name) for name in ("__module__", "__qualname__")}
    entries |= {"piece": piece, "unfused": unfused}
    if "forward" in vars(piece):
        entries["forward"] = _forward_of(piece)
    return type(f"{piece.prefix}{unfused.__name__}", (piece, unfused), entries)


def _forward_of(piece: type[Fused]) -> Callable[..., Any]:
    """The forward of ``piece``, begun again by the former class where another thread gives the module back meanwhile.
    The parts of a call that cannot be done twice, which write to a cache, need nothing of the module any more."""

    @functools.wraps(piece.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return piece.forward(self, *args, **kwargs)
        except Exception:
            if isinstance(self, Fused):
                raise
        return self.forward(*args, **kwargs)

    return forward


def _unset(piece: type[Fused], unfused: type[nn.Module]) -> Fused:
    cls = _class_of(piece, unfused)
    return cls.__new__(cls)


def is_inference(x: Tensor) -> bool:
    """Whether a call with ``x`` is inference on a CPU and nothing else: eager, without gradients, autocast or
    functorch. The ops of the fused pieces have kernel rows there."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and not _is_grad_enabled()
        and not is_traced()
        and not _is_transformed()
        and not _is_autocast_enabled("cpu")
        and forward_ad._current_level < 0  # -1 outside of forward mode
    )


def has_own_tensors(module: nn.Module) -> bool:
    """Whether the module itself, and not one inside of it, has a parameter or a buffer."""
    return any(True for tensors in (module._parameters, module._buffers) for x in tensors.values() if x is not None)


def probe_of(module: nn.Module, **children: nn.Module) -> nn.Module:
    """Return a copy of ``module`` for calls that test it, which other threads and their models do not see: in
    evaluation mode, without hooks, with the same parameters, buffers and attributes, and the same children but for
    those that are given."""
    probe = module.__class__.__new__(module.__class__)
    nn.Module.__init__(probe)
    own = probe.__dict__
    own.update({name: value for name, value in module.__dict__.items() if name not in own})
    for entries in ("_parameters", "_buffers", "_modules"):
        own[entries] = dict(module.__dict__[entries])
    probe._modules.update(children)
    probe.training = False
    return probe


def hooked(module: nn.Module, names: Iterable[str]) -> str:
    """The first of these children, which a fused module does not call, on which something waits for its call; or
    nothing. Children that are no modules cannot be waited for."""
    if _has_any_global_hook():
        return "all modules"
    children = module._modules
    for name in names:
        layer = children.get(name)
        if layer is not None and has_hooks(layer):
            return name
    return ""


def has_hooks(module: nn.Module) -> bool:
    """Whether something waits for the call of this module."""
    inside = module.__dict__
    return bool(
        inside["_forward_hooks"]
        or inside["_forward_pre_hooks"]
        or inside["_backward_hooks"]
        or inside["_backward_pre_hooks"]
        or "forward" in inside  # accelerate's way to hook a module
    )
