# SPDX-License-Identifier: Apache-2.0
"""Register the ops `lowbit::*` with torch: schema and kernel from C++, fake kernels from Python.

C++ registers through the C shims of torch's stable ABI (csrc/torch); torch 2.10 is the first that has them all. A fake
kernel is given the arguments by the names that the schema has for them, and names those that it reads.
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
)  # like the ops, outlives the package where that is loaded again


def register() -> None:
    """Register every op once; calling again does nothing."""
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
        register_key("QuantizedCPU")  # so that a quantized tensor of torch is refused with the name of its argument
        if torch.version.cuda:  # initialises nothing of it
            register_key("CUDA")
        if torch.version.xpu:
            register_key("XPU")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an op that is written in Python, with its fake kernel, unless another copy of the package has been
    there first."""
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
    """Register every op for one more dispatch key of torch (``"PrivateUse1"``), with the kernels that the CPU has."""
    _C.register_torch_key(key)


def argument_names(name: str) -> list[str]:
    """Return the names of the arguments of ``lowbit::name``, in the order of its schema."""
    return [argument.name for argument in _op(name)._schema.arguments]


def by_name(name: str) -> Callable[[dict[str, Any]], Any]:
    """Return ``lowbit::name`` as a function of one dict with all of its arguments, and perhaps others, for a caller who
    has found that no derivative is wanted.

    By keyword, torch takes 0.2 us longer for each argument.
    """
    op, names = _op(name), argument_names(name)
    function, in_order = detached_function(name), operator.itemgetter(*names)  # unknown to Dynamo, both

    def call(arguments: dict[str, Any]) -> Any:
        if _is_dynamo_compiling() or _compiler._is_exporting_flag:
            return op(*[arguments[name] for name in names])
        return function(*in_order(arguments))

    return call


def function_of(name: str) -> Callable[..., Any]:
    """Return ``lowbit::name`` as a function of its arguments in the order of the schema, for a caller who has found
    that no derivative is wanted."""
    op, function = _op(name), detached_function(name)

    def call(*arguments: Any) -> Any:
        return (op if _is_dynamo_compiling() or _compiler._is_exporting_flag else function)(*arguments)

    return call


def detached_function(name: str) -> Callable[..., Any]:
    """Return ``lowbit::name.detached`` (derivatives.py) as the function that its OpOverload calls: 0.2 us less, but
    unknown to Dynamo. Traces and exported programs call ``lowbit::name``, which has the derivatives."""
    return getattr(torch.ops.lowbit, name).detached._op


def check(name: str, arguments: dict[str, Any]) -> None:
    """Raise the errors of ``lowbit::name`` for these arguments. Sizes that only a run knows are left to the run."""
    values = [arguments[argument] for argument in argument_names(name)]
    try:
        _C.check_call(name, [fakes.described(value) for value in values])
    except (ValueError, RuntimeError):
        if not fakes.is_open(values):
            raise


def _op(name: str) -> Any:
    return getattr(torch.ops.lowbit, name).default


def _fake(name: str) -> Callable[..., Any]:
    """The fake kernel as torch calls it: positional as the schema has them, defaults left out. The checks are those
    that the op itself makes. It is looked up when something is traced, so that its file may import this one."""
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
    """Return ``library``, kept alive as long as `_C`: a freed one takes its registrations with it, which a
    reloaded package needs."""
    _C.__dict__.setdefault("_libraries", []).append(library)
    return library


def registered() -> list[dict[str, str]]:
    """Return how each op got registered: ``{"op", "how", "reason"}`` (how: by us, or by another copy of lowbit)."""
    return [dict(row) for row in _registered]
