# SPDX-License-Identifier: Apache-2.0
"""TRL's experimental AsyncDistillationTrainer: refuse heads that lowbit made.

It multiplies by ``lm_head.weight`` in its own loop. Its ``_compute_loss`` is wrapped once, when it is imported
(when_imported.py).
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from trl.experimental.async_distillation.async_distillation_trainer import AsyncDistillationTrainer

from lowbit.huggingface.fused_head import is_served, output_head

_NAME = "AsyncDistillationTrainer"


def refuse_packed_heads() -> None:
    """Wrap the method, unless this was done before."""
    compute = AsyncDistillationTrainer._compute_loss
    if hasattr(compute, "_before_lowbit"):
        return

    @functools.wraps(compute)
    def _compute_loss(self: Any, unwrapped_model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        head = output_head(unwrapped_model)
        if is_served(_NAME, head):
            raise ValueError(
                f"{_NAME}: the output head must be float, got {head.spec.name}: LowbitConfig(head=None) or "
                "filter_fn of quantize_ leaves it so"
            )
        return compute(self, unwrapped_model, *args, **kwargs)

    _compute_loss._before_lowbit = compute  # type: ignore[attr-defined]
    AsyncDistillationTrainer._compute_loss = _compute_loss


refuse_packed_heads()
