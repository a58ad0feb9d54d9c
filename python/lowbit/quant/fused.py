# SPDX-License-Identifier: Apache-2.0
"""The base class of modules that `lowbit.fuse` made faster. The class of a module changes in place and can change back.
Calls that a class does not compute, such as those under autocast, are computed as before."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
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
    """A module of a model with a faster forward; ``super().forward`` is its original one."""

    prefix: ClassVar[str] = "Fused"
    """Prefix of the name of the class that is created."""
    piece: ClassVar[type[Fused]]
    unfused: ClassVar[type[nn.Module]]
    facts: dict[str, Any]
    """What was found out about the module when it was fused."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is created at run time, so neither pickle nor copy could find it by name.
        return _unset, (self.piece, self.unfused), self.__dict__

    @classmethod
    def take(cls, module: nn.Module, facts: dict[str, Any]) -> None:
        """Fuse ``module`` in place, so that references to it, its hooks and its name stay valid.

        The assignment of the class is the only visible change, so another thread or an interrupt sees either the
        original or the fused module. If another thread has fused the module in the meantime, nothing is done.
        """
        with _taking:
            if not isinstance(module, Fused):
                module.facts = facts
                module.__class__ = _class_of(cls, type(module))

    def give_back(self) -> None:
        """Turn the module back into its former class.

        A call that is still running in another thread may fail for lack of ``facts`` or methods; `_forward_of` then
        repeats it with the former class.
        """
        self.__class__ = self.unfused
        del self.facts


class FusedModules(LayerNames):
    """Names of the fused modules. Printed, it has one line for modules of the same kind.

    Attributes:
        left: names of the modules that were not fused, each with the reason.
        notes: what a user of the fused modules should know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, str] = {}
        self.notes: list[str] = []

    def __repr__(self) -> str:
        reasons = dict.fromkeys(self.left.values())
        left = {reason: told([name for name in self.left if self.left[name] == reason]) for reason in reasons}
        lines = (f"left: {names}: {reason}" for reason, names in left.items())
        return "\n".join([super().__repr__(), *lines, *(f"note: {note}" for note in self.notes)])


def unfuse(model: nn.Module) -> None:
    """Turn every fused module of ``model`` back into its former class."""
    for module in model.modules():
        if isinstance(module, Fused):
            module.give_back()


@functools.cache
def _class_of(piece: type[Fused], unfused: type[nn.Module]) -> type[Fused]:
    """Return a subclass of both classes. Code that looks for the original class still finds it, by isinstance or by
    name; transformers does so to record outputs."""
    entries = {name: getattr(unfused, name) for name in ("__module__", "__qualname__")}
    entries |= {"piece": piece, "unfused": unfused}
    if any("forward" in vars(base) for base in piece.__mro__[: piece.__mro__.index(Fused)]):
        entries["forward"] = _forward_of(piece)
    return type(f"{piece.prefix}{unfused.__name__}", (piece, unfused), entries)


def _forward_of(piece: type[Fused]) -> Callable[..., Any]:
    """Return the forward of ``piece``, which repeats a failed call with the former class if another thread has unfused
    the module in the meantime. Whatever must not be repeated, such as writing to a cache, comes after the last access
    to the module."""

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
    """Return whether a call with ``x`` is plain inference on the CPU: eager, without gradients, autocast or functorch.
    For such calls the ops of fused modules have kernel rows."""
    return not _is_grad_enabled() and is_eager(x)


def is_eager(x: Tensor) -> bool:
    """Return whether a call with ``x`` runs at once on the CPU, without autocast or functorch, be it recorded by
    autograd or not."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and not is_traced()
        and not _is_transformed()
        and not _is_autocast_enabled("cpu")
        and forward_ad._current_level < 0  # it is -1 outside forward-mode differentiation
    )


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional arguments of a module behind its input."""
    others = [*inspect.signature(module.forward).parameters.values()][1:]
    return tuple(each.name for each in others if each.kind is each.POSITIONAL_OR_KEYWORD)


def named(module: Fused, args: Sequence[Any]) -> dict[str, Any]:
    """Return the positional arguments of a module behind its input, by the names in its ``facts["arguments"]``."""
    names = module.facts["arguments"]
    if len(args) > len(names):
        raise TypeError(f"{type(module).__name__}: positional arguments must be at most {len(names)}, got {len(args)}")
    return dict(zip(names, args, strict=False))


def has_own_tensors(module: nn.Module) -> bool:
    """Return whether the module itself, not counting its submodules, has a parameter or a buffer."""
    return any(True for tensors in (module._parameters, module._buffers) for x in tensors.values() if x is not None)


def probe_of(module: nn.Module, **children: nn.Module) -> nn.Module:
    """Return a copy of ``module`` for trial calls, which do not affect other users of the module.

    The copy is in evaluation mode and has no hooks. It shares parameters, buffers, attributes and children with the
    module, except for the given children.
    """
    probe = module.__class__.__new__(module.__class__)
    nn.Module.__init__(probe)
    own = probe.__dict__
    own.update({name: value for name, value in module.__dict__.items() if name not in own})
    for entries in ("_parameters", "_buffers", "_modules"):
        own[entries] = dict(module.__dict__[entries])
    probe._modules.update(children)
    probe.training = False
    return probe


def with_children(module: nn.Module, **children: Any) -> nn.Module:
    """Return a copy of the module for one call, with ``children``, if any, replacing submodules. The module itself does not
    change, because other threads and hooks use it."""
    cls = type(module)
    twin = cls.__new__(cls)
    twin.__dict__.update(module.__dict__, _modules=module._modules | children)
    return twin


@torch.no_grad()
def is_same_in_training(probe: nn.Module, x: Tensor, wanted: Tensor) -> bool:
    """Return whether a module whose result in evaluation mode is ``wanted`` returns the same in training mode: nothing is
    dropped. ``probe`` is a `probe_of` it, in evaluation mode before and after."""
    probe.training = True
    try:
        with torch.random.fork_rng(devices=[]):
            return probe(x).equal(wanted)
    finally:
        probe.training = False


def submodule_at(module: nn.Module, path: str) -> nn.Module | None:
    """Return the submodule with this qualified name, or None; the module itself for an empty one."""
    for name in path.split(".") if path else ():
        module = None if module is None else module._modules.get(name)
    return module


def probe_with(module: nn.Module, pieces: dict[str, nn.Module]) -> nn.Module:
    """Return a `probe_of` the module in which ``pieces``, by their qualified names, replace submodules at any depth."""
    inside: dict[str, dict[str, nn.Module]] = {}
    children = {path: piece for path, piece in pieces.items() if "." not in path}
    for path, piece in pieces.items():
        name, _, rest = path.partition(".")
        if rest:
            inside.setdefault(name, {})[rest] = piece
    children |= {name: probe_with(module._modules[name], more) for name, more in inside.items()}
    return probe_of(module, **children)


def hooked(module: nn.Module, names: Iterable[str]) -> str:
    """Return the first of these children that has hooks, or an empty string.

    A fused module does not call these children, so their hooks would not run. Children that are not modules cannot have
    hooks.
    """
    if _has_any_global_hook():
        return "all modules"
    children = module._modules
    for name in names:
        layer = children.get(name)
        if layer is not None and has_hooks(layer):
            return name
    return ""


def not_packed(name: str, layer: nn.Module | None) -> str:
    """Say why this child, which is no `QuantLinear`, is part of no fused call."""
    if hasattr(layer, "get_base_layer"):
        over = type(layer.get_base_layer()).__name__
        return f"{name} has an adapter of peft over {over} that is no LoRA over a QuantLinear: merge it, then fuse"
    return f"{name} is {type(layer).__name__}, no QuantLinear"


def has_hooks(module: nn.Module) -> bool:
    """Return whether this module has hooks that a call would run."""
    inside = module.__dict__
    return bool(
        inside["_forward_hooks"]
        or inside["_forward_pre_hooks"]
        or inside["_backward_hooks"]
        or inside["_backward_pre_hooks"]
        or "forward" in inside  # accelerate's way to hook a module
    )
