# SPDX-License-Identifier: Apache-2.0
"""Functions that Dynamo runs, where it would look into others."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def constant_in_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have Dynamo call the function while it traces and keep the result in the graph, as
    ``torch.compiler.assume_constant_result`` does it, which loads the whole compiler to set this attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
