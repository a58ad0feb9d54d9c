# SPDX-License-Identifier: Apache-2.0
"""Rows for lowbit: an int8 linear in C for the CPU, and attention in Python for the simulated device."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from lowbit_example import attention


def register(api: Any) -> str | None:
    """Called by lowbit, once, when the list of its kernels is first needed."""
    if api.version != 1:
        return None  # a later lowbit: add nothing
    library = find_spec("lowbit_example._rows")
    if library is None or library.origin is None:
        raise ImportError("lowbit_example._rows is not there: this is the source, pip install it")
    api.add_library(library.origin)
    name = "attention_forward_torch_example"
    api.add_kernel("attention_forward", name, "lowbit_sim", attention.forward, attention.refuses, first=True)
    return "an example"
