# SPDX-License-Identifier: Apache-2.0
"""Whether a call is recorded in a graph."""

from __future__ import annotations

import torch

_is_dynamo_compiling, _compiler = torch.compiler.is_dynamo_compiling, torch.compiler
_active_modes = torch._C._len_torch_dispatch_stack


def is_traced() -> bool:
    """Return whether the call is recorded in a graph, by Dynamo or by an export in this thread.

    `torch.compiler.is_compiling` is of the process: True in all threads while one of them compiles.
    """
    return _is_dynamo_compiling() or (_compiler._is_compiling_flag and _active_modes() > 0)
