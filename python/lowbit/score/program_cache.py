# SPDX-License-Identifier: Apache-2.0
"""A cache of the score programs of mods: a new closure over other tensors has the same program.

Looking up a program is much faster than tracing one. The key contains the code, the constants, and the dtypes and ranks
of the captured tensors (captured.py), and also their shapes if the mod depends on them.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowbit import devices
from lowbit.score.captured import Captured, captured_by
from lowbit.score.program import UnknownOp
from lowbit.score.proxy import RandomOp
from lowbit.score.tracer import DataDependent, MutatedArgument, Steps, Subgraph, Tracer

_KEPT = 512
_SCORE, _MASK = "score_mod", "mask_mod"


@dataclass(frozen=True, slots=True)
class Program:
    """The code, and how the tensors that it reads are computed from the captured ones. Empty code means that the mod
    changes nothing."""

    code: list[int]
    steps: Steps
    sources: list[int]
    keep: bool
    reads_shapes: bool


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a mod has no program. It is stored as text, because an exception would keep its frames alive, and
    the tensors of the call with them."""

    text: str


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program and its tensors, in the form that an attention op takes."""

    code: list[int]
    captured: list[Tensor]


_programs: dict[Any, Program | Reason] = {}
traces = 0
"""The number of mods traced so far, for tests."""


def bind(op: str, mod: Callable[..., Any], *, mask: bool, dtype: torch.dtype = torch.float32) -> BoundProgram:
    """Return the program of a mod with the tensors that it captures now.

    Args:
        op: the name of the caller, for errors.
        mod: ``score_mod(score, b, h, q_idx, kv_idx)`` or, with ``mask``, ``mask_mod(b, h, q_idx, kv_idx)``.
        mask: whether the mod is a mask_mod.
        dtype: float64 if the scores are.

    Raises:
        UnknownOp: the mod computes something that a program cannot express; evaluate it through torch.
        RuntimeError: the mod branches on values, draws random numbers or writes to its arguments.
    """
    captured = Captured(mod.tensors) if isinstance(mod, Subgraph) else captured_by(mod)
    argument = _MASK if mask else _SCORE
    for tensor in captured.tensors:
        devices.check(
            op, f"tensors captured by {argument}", tensor.device, kernel="attention_forward", error=RuntimeError
        )
    key = None if captured.key is None else (mask, dtype == torch.float64, *_surroundings(), captured.key)
    program = _programs.get(key) if key is not None else None
    if program is None:
        shaped = key and (key, tuple(map(tuple, captured.shapes)))
        program = _programs.get(shaped) if shaped else None
        if program is None:
            with _disable_current_modes():  # modes of torch.compile and torch.export
                program = _trace(op, argument, mod, captured.tensors, dtype)
            if isinstance(program, Reason) or program.keep:
                _keep(shaped if isinstance(program, Reason) or program.reads_shapes else key, program)
    if isinstance(program, Reason):
        raise UnknownOp(program.text)
    tensors = program.steps.run(captured.tensors, program.sources)
    if mask and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(f"{op}: Captured buffers from mask mod that require grad are not supported; use .detach()")
    return BoundProgram(program.code, tensors)


def _surroundings() -> tuple[Any, ...]:
    """Return the global settings that affect the dtypes of a mod's results."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return torch.get_default_dtype(), autocast


def _keep(key: Any, program: Program | Reason) -> None:
    if key is None:
        return
    if len(_programs) >= _KEPT:
        _programs.pop(next(iter(_programs)), None)
    _programs[key] = program


def _trace(
    op: str, argument: str, mod: Callable[..., Any], captured: list[Tensor], dtype: torch.dtype
) -> Program | Reason:
    global traces
    traces += 1
    tracer = Tracer(captured)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    arguments = [tracer.argument(name, torch.int32) for name in "bhqk"]
    if argument == _SCORE:
        arguments.insert(0, tracer.argument("score", real))
    try:
        with (
            contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        ):  # created by the mod itself
            made = tracer.run(mod, arguments)
        return _finish(op, argument, tracer, made)
    except UnknownOp as unknown:
        return Reason(str(unknown))
    except DataDependent:
        raise RuntimeError(
            f"{op}: {argument} must not use the value of a tensor in Python (`if`, `.item()`), as this is "
            "data-dependent control flow; "
            "use torch.where"
        ) from None
    except RandomOp:
        raise RuntimeError(
            f"{op}: {argument} must not draw random numbers (vmap's randomness error); for dropout use dropout_p"
        ) from None
    except MutatedArgument as write:
        from torch._higher_order_ops.utils import UnsupportedAliasMutationException

        raise UnsupportedAliasMutationException(
            f"{op}: {argument} must not write to its arguments or to captured tensors. Mutations detected in "
            f"{argument}: "
            f"aten.{write}"
        ) from None


def _finish(op: str, argument: str, tracer: Tracer, made: Any) -> Program:
    if not isinstance(made, Tensor):
        raise ValueError(f"{op}: {argument} must return a tensor, got {type(made).__name__}")
    if made.dim():
        raise ValueError(
            f"{op}: {argument} must return one value per score (a 0-d tensor), got shape {list(made.shape)}"
        )
    if argument == _MASK and made.dtype != torch.bool:
        raise ValueError(f"{op}: mask_mod must return a bool tensor, got {str(made.dtype).removeprefix('torch.')}")
    program, made = tracer.program, tracer.replace(made)
    value = program.convert(tracer.values(tracer.numbers(made))[0], "float" if argument == _SCORE else "bool")
    same = value == (program.op("score") if argument == _SCORE else program.constant(True))
    return Program(
        code=[] if same else program.finish(value),
        steps=tracer.steps,
        sources=[] if same else tracer.sources,
        keep=not tracer.reads_values,
        reads_shapes=tracer.reads_shapes,
    )


_warned: set[str] = set()


def warn_unknown(op: str, argument: str, unknown: UnknownOp) -> None:
    """Warn, once per reason, that a mod runs through torch."""
    if str(unknown) not in _warned:
        _warned.add(str(unknown))
        warnings.warn(
            f"{op}: {argument} uses {unknown}, which score programs do not have; it runs through torch, slowly",
            stacklevel=4,
        )


def positional_arguments(mod: Callable[..., Any]) -> int:
    """Return the number of arguments without a default: 5 for a score_mod, 4 for a mask_mod."""
    if isinstance(mod, torch.nn.Module):
        mod = mod.forward
    if hasattr(mod, "__code__"):
        return mod.__code__.co_argcount - len(mod.__defaults__ or ()) - inspect.ismethod(mod)
    return sum(parameter.default is parameter.empty for parameter in inspect.signature(mod).parameters.values())


__all__ = ["BoundProgram", "Program", "bind", "positional_arguments", "warn_unknown"]
