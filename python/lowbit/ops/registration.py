# SPDX-License-Identifier: Apache-2.0
"""Register the ops `lowbit::*` with torch: schema and CPU kernel from C++, fake kernels from Python.

C++ registers through the C shims of torch's stable ABI (csrc/torch). Where they are missing (old torch) the same schema is
defined by `torch.library` with the functions of `_C` as kernels: slower per call, same results; `registered()` says which
happened and why.
"""

from __future__ import annotations

import threading

import torch

from lowbit import _C
from lowbit.ops import attention_op, autocast, decode_op, fakes

_lock = threading.Lock()
_registered: list[dict[str, str]] = _C.__dict__.setdefault("_registered", [])  # like the ops, outlives the package where that is loaded again


def register() -> None:
    """Register every op once; calling again does nothing."""
    with _lock:
        if _registered:
            return
        rows = {row["op"].removeprefix("lowbit::"): {key: str(value) for key, value in row.items()} for row in _C.register_torch()}
        library = keep(torch.library.Library("lowbit", "FRAGMENT"))
        for name, (schema, kernel, fake) in _OPS.items():
            row = rows.get(name, {"op": name, "how": "", "reason": "not offered by _C.register_torch()"})
            if not row["how"]:
                library.define(name + schema)
                library.impl(name, kernel, "CPU")
                row["how"] = "torch.library"
            torch.library.register_fake(f"lowbit::{name}", fake, lib=library)
            row["op"] = f"lowbit::{name}"
            _registered.append(row)
        autocast.register_linear(library)


def register_key(key: str) -> None:
    """Register every op for one more dispatch key of torch (``"PrivateUse1"``), with the kernels that the CPU has."""
    done = {name.removeprefix("lowbit::") for name in _C.register_torch_key(key)}
    library = keep(torch.library.Library("lowbit", "IMPL"))
    for name, (_, kernel, _) in _OPS.items():
        if name not in done:
            library.impl(name, kernel, key)


def keep(library: torch.library.Library) -> torch.library.Library:
    """Return ``library``, kept alive as long as `_C`: a freed one takes its registrations with it, which a reloaded package needs."""
    _C.__dict__.setdefault("_libraries", []).append(library)
    return library


def registered() -> list[dict[str, str]]:
    """Return how each op got registered: ``{"op", "how", "reason"}`` (reason: why not the fast way, or empty)."""
    return [dict(row) for row in _registered]


def _linear(x, weight, n, k, format, group_size, asymmetric, x_format, bias=None, activation=0, mul=None, add=None):
    out = x.new_empty((*x.shape[:-1], n))
    _C.linear(x, weight, out, n, k, format, group_size, asymmetric, x_format, bias, activation, mul, add)
    return out


def _dequantize(weight, n, k, format, group_size, asymmetric):
    out = weight.new_empty((n, k), dtype=torch.float32)
    _C.dequantize(weight, n, k, format, group_size, asymmetric, out)
    return out


_OPS = {
    "linear": (
        "(Tensor x, Tensor weight, int n, int k, int format, int group_size, bool asymmetric, int x_format, "
        "Tensor? bias=None, int activation=0, Tensor? mul=None, Tensor? add=None) -> Tensor",
        _linear,
        fakes.linear,
    ),
    "dequantize": (
        "(Tensor weight, int n, int k, int format, int group_size, bool asymmetric) -> Tensor",
        _dequantize,
        fakes.dequantize,
    ),
    **attention_op.OPS,
    **decode_op.OPS,
}
"""Schema, Python kernel and fake kernel of each op; the schemas are those of csrc/torch."""
