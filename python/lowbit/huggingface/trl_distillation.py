# SPDX-License-Identifier: Apache-2.0
"""TRL's DistillationTrainer, whose loss reads slices of the weights of two heads, the student's and the teacher's.

Its ``_compute_loss`` is wrapped once, when it is imported (when_imported.py). If lowbit made neither head, it runs
unchanged. Otherwise a copy of it runs that uses `ServedHead` in place of the Function behind the loss.
"""

from __future__ import annotations

import functools
from typing import Any

import trl
from torch import nn
from trl.trainer import distillation_trainer

from lowbit.huggingface.fused_head import ServedHead, is_served, output_head, with_globals

_FUNCTION = "ChunkedDivergenceFunction"
_LOSS = "_chunked_divergence_loss"
_STUDENT, _TEACHER = 1, 4  # apply(hidden, weight, bias, hidden, weight, bias, ...)
_Trainer = distillation_trainer.DistillationTrainer

if not (
    hasattr(distillation_trainer, _FUNCTION)
    and hasattr(distillation_trainer, _LOSS)
    and "_compute_loss" in vars(_Trainer)
):
    raise ImportError(
        f"lowbit.huggingface.trl_distillation knows the loss of trl 1.16, got trl {trl.__version__}, which has "
        "another: its trainer wants models whose output head is float (LowbitConfig(head=None), filter_fn of "
        "quantize_)"
    )


def serve_packed_heads() -> None:
    """Wrap ``DistillationTrainer._compute_loss``, unless this was done before."""
    compute = _Trainer._compute_loss
    if hasattr(compute, "_before_lowbit"):
        return

    @functools.wraps(compute)
    def _compute_loss(self: Any, unwrapped_student: nn.Module, *args: Any, **kwargs: Any) -> Any:
        models = {_STUDENT: unwrapped_student, _TEACHER: self.accelerator.unwrap_model(self.teacher_model)}
        served = {
            position: functools.partial(output_head, model)
            for position, model in models.items()
            if is_served("DistillationTrainer", output_head(model))
        }
        if not served:
            return compute(self, unwrapped_student, *args, **kwargs)
        function = ServedHead(getattr(distillation_trainer, _FUNCTION), served)
        loss = with_globals(getattr(distillation_trainer, _LOSS), **{_FUNCTION: function})
        return with_globals(compute, **{_LOSS: loss})(self, unwrapped_student, *args, **kwargs)

    _compute_loss._before_lowbit = compute  # type: ignore[attr-defined]
    _Trainer._compute_loss = _compute_loss


serve_packed_heads()
