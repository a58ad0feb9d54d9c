# SPDX-License-Identifier: Apache-2.0
"""gated_delta_rule of CUDA tensors through the package flash-linear-attention (`fla`), where that is installed: lowbit
has no rows for it on GPUs, and fla's Triton kernels take the same layouts."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.ops import registration

_FUNCTIONS = {  # by whether each channel has a decay of its own, and whether it is called for a token without gradients
    (False, False): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    (False, True): ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    (True, False): ("fla.ops.kda", "chunk_kda"),
    (True, True): ("fla.ops.kda", "fused_recurrent_kda"),
}


def gated_delta_rule_by_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    l2norm: bool,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return o and the new state as fla computes them, with its roundings and gradients.

    Shapes and dtypes are checked as on the CPU. The numbers of g and cu_seqlens are not: that would wait for the GPU.

    Raises:
        NotImplementedError: fla is not installed, cannot be imported, has no such function, or refuses the call.
    """
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state, "l2norm": l2norm, "scale": scale}
    registration.check("gated_delta_rule", given | {"cu_seqlens": cu_seqlens})
    tensors = (q, k, v, g, beta, state)
    recorded = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    function = _function(g.dim() == 4, q.shape[1] == 1 and not recorded)
    group = v.shape[2] // q.shape[2]
    if group > 1:  # not all versions of fla take fewer heads of keys
        q, k = (tensor.repeat_interleave(group, dim=2) for tensor in (q, k))
    try:
        o, last = function(
            q, k, v,
            g=g,
            beta=beta,
            scale=scale,
            initial_state=None if state is None else state.float(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=l2norm,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
        )  # fmt: skip
    except AssertionError as error:  # its chunks take no float32 in some versions
        raise NotImplementedError(f"gated_delta_rule: flash-linear-attention refuses this call: {error}") from error
    return o.to(v.dtype), last.to(torch.float32 if state is None else state.dtype)


def _function(per_channel: bool, of_token: bool) -> Callable[..., Any]:
    module, name = _FUNCTIONS[per_channel, of_token]
    wanted = "gated_delta_rule: CUDA tensors are served through the package flash-linear-attention alone"
    if importlib.util.find_spec("fla") is None:
        raise NotImplementedError(f"{wanted}, which is not installed: pip install flash-linear-attention")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, RuntimeError) as error:  # without Triton or a driver its modules raise
        raise NotImplementedError(f"{wanted}, of which {module}.{name} cannot be imported: {error}") from error
