# SPDX-License-Identifier: Apache-2.0
"""lowbit.c_shim_options: options that make a .pt2 of AOTInductor call lowbit's ops as C functions."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from lowbit import _C
from lowbit.ops.registration import register

register()


def c_shim_options() -> dict[str, Any]:
    """Return ``inductor_configs`` that make a .pt2 call lowbit's CPU ops as C functions of ``liblowbit.so``, without
    going through torch's executor of custom ops.

    A process that loads the .pt2 must have the library: in Python after ``import lowbit``, or ``import torch`` if
    lowbit is installed; in C++ by linking to it. If a .pt2 was compiled for another schema of an op, its first call
    raises an error.

    Example:
        >>> configs = lowbit.compile_options() | lowbit.c_shim_options()
        >>> torch._inductor.aoti_compile_and_package(program, package_path="model.pt2", inductor_configs=configs)
    """
    lookup = "void (*lowbit_c_shim(const char*))()"
    shims = {
        getattr(torch.ops.lowbit, name).detached: [lookup, declaration]  # the overload in graphs of Inductor
        for name, declaration in _C.c_declarations().items()
    }
    folder = shlex.quote(str(Path(_C.__file__).parent))  # Inductor has no option for library folders
    return {
        "aot_inductor.custom_ops_to_c_shims": shims,
        "aot_inductor.custom_op_libs": [f"lowbit -L{folder}"],
    }
