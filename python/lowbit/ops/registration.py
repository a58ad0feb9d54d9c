# SPDX-License-Identifier: Apache-2.0
"""Registration of the ops `lowbit::*` with torch: schemas and kernels from C++, fake kernels from Python.

C++ registers through the C shims of torch's stable ABI (csrc/torch); torch 2.10 is the first version that has all of
them. A fake kernel gets the arguments by the names of the schema, and declares those that it reads.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import torch

from lowbit import _C
from lowbit.ops import autocast, derivatives, fakes

_is_dynamo_compiling, _compiler = torch.compiler.is_dynamo_compiling, torch.compiler
_lock = threading.Lock()
_registered: list[dict[str, str]] = _C.__dict__.setdefault(
    "_registered", []
)  # stored in _C, since it must survive a reload of the package, as the ops do


def register() -> None:
    """Register every op; a second call does nothing."""
    with _lock:
        if _registered:
            return
        rows = {
            row["op"].removeprefix("lowbit::"): {key: str(value) for key, value in row.items()}
            for row in _C.register_torch()
        }
        library = keep(torch.library.Library("lowbit", "FRAGMENT"))
        for name, row in rows.items():
            if not row["how"]:
                raise ImportError(
                    f"lowbit needs PyTorch 2.10 or later, got {torch.__version__}: {row['op']}: {row['reason']}"
                )
            for entry in (name, f"{name}.detached"):
                torch.library.register_fake(f"lowbit::{entry}", _fake(name), lib=library)
            derivatives.register(name, library)
            _registered.append(row)
        autocast.register_linear(library)
        register_key("QuantizedCPU")  # for errors that name the argument if it is a quantized tensor of torch
        if torch.version.cuda:  # does not initialize CUDA
            register_key("CUDA")
        if torch.version.xpu:
            register_key("XPU")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an op that is written in Python, with its fake kernel, unless another copy of the package has done
    so."""
    name = schema.partition("(")[0]
    if torch._C._dispatch_has_kernel(f"lowbit::{name}"):
        return
    library = keep(torch.library.Library("lowbit", "FRAGMENT"))
    library.define(schema)
    for key in ("CPU", "CUDA", "XPU", "PrivateUse1"):
        library.impl(name, function, key)
    torch.library.register_fake(f"lowbit::{name}", fake, lib=library)
    derivatives.register(name, library)


def register_key(key: str) -> None:
    """Register every op for another dispatch key of torch, such as ``"PrivateUse1"``, with the kernels of the CPU."""
    _C.register_torch_key(key)


def argument_names(name: str) -> list[str]:
    """Return the names of the arguments of ``lowbit::name``, in the order of its schema."""
    return [argument.name for argument in _op(name)._schema.arguments]


def by_name(name: str) -> Callable[[dict[str, Any]], Any]:
    """Return ``lowbit::name`` as a function of a dict with at least all of its arguments, for callers that have checked
    that no derivative is needed.

    The arguments are passed by position, because torch is slower with keywords.
    """
    op, names = _op(name), argument_names(name)
    function, in_order = detached_function(name), operator.itemgetter(*names)  # Dynamo supports neither

    def call(arguments: dict[str, Any]) -> Any:
        if _is_dynamo_compiling() or _compiler._is_exporting_flag:
            return op(*[arguments[name] for name in names])
        return function(*in_order(arguments))

    return call


def function_of(name: str) -> Callable[..., Any]:
    """Return ``lowbit::name`` as a function of its arguments in the order of the schema, for callers that have checked
    that no derivative is needed."""
    op, function = _op(name), detached_function(name)

    def call(*arguments: Any) -> Any:
        return (op if _is_dynamo_compiling() or _compiler._is_exporting_flag else function)(*arguments)

    return call


def detached_function(name: str) -> Callable[..., Any]:
    """Return the function inside the OpOverload ``lowbit::name.detached`` (derivatives.py).

    Calling it directly is faster, but not supported by Dynamo. Traces and exported programs call ``lowbit::name``,
    which has the derivatives.
    """
    return getattr(torch.ops.lowbit, name).detached._op


def check(name: str, arguments: dict[str, Any]) -> None:
    """Raise the errors of ``lowbit::name`` for these arguments. If sizes are unknown before run time, errors are left
    to the run."""
    values = [arguments[argument] for argument in argument_names(name)]
    try:
        _C.check_call(name, [fakes.described(value) for value in values])
    except (ValueError, RuntimeError):
        if not fakes.is_open(values):
            raise


def _op(name: str) -> Any:
    return getattr(torch.ops.lowbit, name).default


def _fake(name: str) -> Callable[..., Any]:
    """Return the fake kernel in the form that torch calls: with positional arguments, and defaults omitted.

    It makes the same checks as the op. The op's own fake kernel is looked up in the call, because its file imports this
    one.
    """
    names = argument_names(name)
    arguments = _op(name)._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

    def fake(*given: Any, **named: Any) -> Any:
        if torch.onnx.is_in_onnx_export():
            raise NotImplementedError(
                f"torch.onnx.export: ONNX has no op {name} of lowbit; lowbit.export.onnx.export(model, args) "
                "exports quantized models"
            )
        values = defaults | dict(zip(names, given, strict=False)) | named
        check(name, values)
        return fakes.fake_of(name)(**values)

    return fake


def keep(library: torch.library.Library) -> torch.library.Library:
    """Keep ``library`` alive as long as `_C`, and return it. Freeing it would remove its registrations, which a
    reloaded package needs."""
    _C.__dict__.setdefault("_libraries", []).append(library)
    return library


def registered() -> list[dict[str, str]]:
    """Return how each op was registered, as ``{"op", "how", "reason"}``: by this copy of lowbit or by another one."""
    return [dict(row) for row in _registered]
