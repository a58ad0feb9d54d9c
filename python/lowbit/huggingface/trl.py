# SPDX-License-Identifier: Apache-2.0
"""TRL: its trainers compute log-probabilities from slices of ``lm_head.weight``, which may be packed.

SFTTrainer, DPOTrainer, GRPOTrainer, KTOTrainer and RLOOTrainer replace the forward of their models with
``add_fused_lm_head``. This function is wrapped once, when trl is imported (when_imported.py): if lowbit made the head
of a model, that model's new forward uses `PackedLogProbs`, and computes the rows that have a label. Other models are not
affected.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import trl
from torch import nn
from trl.trainer import utils

from lowbit.huggingface.fused_head import is_served, output_head, with_globals
from lowbit.huggingface.packed_log_probs import PackedLogProbs

_FUNCTION = "_ChunkedLogProbFunction"
_COMPACT = "_use_triton"  # asked whether rows without a label are left out, as they are on GPUs

if not all(hasattr(utils, name) for name in ("add_fused_lm_head", _FUNCTION, _COMPACT)):
    raise ImportError(
        f"lowbit.huggingface.trl knows the fused head of trl 1.16, got trl {trl.__version__}, which has another: its "
        "trainers want models whose output head is float (LowbitConfig(head=None), filter_fn of quantize_)"
    )


def serve_packed_heads() -> None:
    """Wrap ``add_fused_lm_head``, everywhere trl refers to it, unless this was done before."""
    add = utils.add_fused_lm_head
    if hasattr(add, "_before_lowbit"):
        return

    @functools.wraps(add)
    def add_fused_lm_head(
        model: nn.Module, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        is_ours = is_served("add_fused_lm_head", output_head(model))
        if is_ours and cast_lm_head_to_fp32:
            raise ValueError(
                "add_fused_lm_head: cast_lm_head_to_fp32 must be False for an output head that lowbit made: its weight "
                "is decoded as it is, and the packed bytes cannot be cast"
            )
        add(model, temperature, cast_lm_head_to_fp32, *args, **kwargs)
        if is_ours:
            head = PackedLogProbs(getattr(utils, _FUNCTION), functools.partial(output_head, model))
            served = {_FUNCTION: head, _COMPACT: lambda device: True}
            model.forward = types.MethodType(with_globals(model.forward.__func__, **served), model)

    add_fused_lm_head._before_lowbit = add  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trl" and vars(module).get("add_fused_lm_head") is add:
            module.add_fused_lm_head = add_fused_lm_head  # type: ignore[attr-defined]


serve_packed_heads()
