# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes' CPU ops on lowbit's kernels, for unchanged programs that use its optimizers and layers.

At the end of its import, bitsandbytes calls the entry points of the group ``bitsandbytes.backends``; lowbit's, in
`lowbit_autoload`, calls `take_ops`. Each op in the table below then has a CPU kernel of lowbit, which handles the calls
that it can compute equivalently and passes the others to bitsandbytes' own kernel. LOWBIT_BITSANDBYTES=0 disables this.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lowbit.ops.registration import keep
from lowbit.peers.bitsandbytes_codes import quantize_blockwise
from lowbit.peers.bitsandbytes_linear import dequantize_4bit, gemm_4bit, gemv_4bit, int8_scaled_mm
from lowbit.peers.bitsandbytes_optim import optimizer_update_8bit_blockwise, optimizer_update_32bit

OPS: tuple[Callable[..., Any], ...] = (
    optimizer_update_8bit_blockwise,
    optimizer_update_32bit,
    quantize_blockwise,
    gemm_4bit,
    gemv_4bit,
    dequantize_4bit,
    int8_scaled_mm,
)
"""lowbit's kernels. Each has the name and the arguments of bitsandbytes' op, preceded by ``theirs``, which calls
bitsandbytes' own kernel with the same arguments.

dequantize_blockwise is left out: it is a lookup in 256 values, at which bitsandbytes' kernel is as fast.
"""

states: dict[str, str] = {}
"""The state of each op, for `lowbit.info()`."""


def take_ops() -> None:
    """Register lowbit's CPU kernels for bitsandbytes' ops. An op that is missing or has other arguments is left
    alone."""
    library = keep(torch.library.Library("bitsandbytes", "IMPL"))
    for ours in OPS:
        states[ours.__name__] = _take(library, ours)
    if states["gemm_4bit"] == "ours":
        _keep_weights_in_order()


def _keep_weights_in_order() -> None:
    """Make Linear4bit call gemm_4bit. If bitsandbytes has a kernel for AVX512-BF16, a layer would otherwise reorder its
    weight for that kernel in its first call, and round its scales to bfloat16."""
    from bitsandbytes.nn import modules

    modules.has_avx512bf16 = lambda: False


def _take(library: torch.library.Library, ours: Callable[..., Any]) -> str:
    name = ours.__name__
    packet = getattr(torch.ops.bitsandbytes, name, None)
    if packet is None:
        return "bitsandbytes has no such op"
    wanted = [*inspect.signature(ours).parameters][1:]
    there = [argument.name for argument in packet.default._schema.arguments]
    if there != wanted:
        return f"left to bitsandbytes, whose op takes {', '.join(there)}"
    kernel = torch.library.get_kernel(packet.default, "CPU")

    def call(keys: torch.DispatchKeySet, *given: Any, **named: Any) -> Any:
        return ours(lambda: kernel.call_boxed(keys, *given, **named), *given, **named)

    with warnings.catch_warnings():  # torch warns about every replaced kernel
        warnings.simplefilter("ignore", UserWarning)
        library.impl(name, call, "CPU", with_keyset=True, allow_override=True)
    return "ours"
