# SPDX-License-Identifier: Apache-2.0
"""lowbit.c_shim_options: options by which a .pt2 of AOTInductor calls our ops as C functions."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from lowbit import _C
from lowbit.ops.registration import register

register()


def c_shim_options() -> dict[str, Any]:
    """Return the ``inductor_configs`` by which a .pt2 calls the ops of lowbit on the CPU as C functions of
    ``liblowbit.so``, and not through torch's executor of custom ops.

    A process that loads the .pt2 has to have the library: Python after ``import lowbit``, or ``import torch`` where
    lowbit is installed; a C++ program that is linked to it. A .pt2 that was compiled for another schema of an op is
    refused by its first call.

    Example:
        >>> configs = lowbit.compile_options() | lowbit.c_shim_options()
        >>> torch._inductor.aoti_compile_and_package(program, package_path="model.pt2", inductor_configs=configs)
    """
    lookup = "void (*lowbit_c_shim(const char*))()"
    shims = {
        getattr(torch.ops.lowbit, name).detached: [lookup, declaration]  # the entry in graphs of Inductor
        for name, declaration in _C.c_declarations().items()
    }
    folder = shlex.quote(str(Path(_C.__file__).parent))  # Inductor has no option for the folder of a library
    return {
        "aot_inductor.custom_ops_to_c_shims": shims,
        "aot_inductor.custom_op_libs": [f"lowbit -L{folder}"],
    }
