# SPDX-License-Identifier: Apache-2.0
"""Detection of tracing, and functions whose result is a constant in a traced graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_is_dynamo_compiling, _compiler = torch.compiler.is_dynamo_compiling, torch.compiler
_active_modes = torch._C._len_torch_dispatch_stack
_P = ParamSpec("_P")
_R = TypeVar("_R")


def is_traced() -> bool:
    """Return whether the call is traced, by Dynamo or by an export in this thread.

    `torch.compiler.is_compiling` is not enough, since it is True in all threads of the process while one compiles.
    """
    return _is_dynamo_compiling() or (_compiler._is_compiling_flag and _active_modes() > 0)


def constant_in_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Mark a function that Dynamo calls during tracing, and whose result becomes a constant of the graph.

    ``torch.compiler.assume_constant_result`` does the same, but imports the whole compiler to set this attribute.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
