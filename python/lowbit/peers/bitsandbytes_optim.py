# SPDX-License-Identifier: Apache-2.0
"""The updates of bitsandbytes' optimizers (32-bit, and 8-bit in blocks of 256) by lowbit's optimizer step.

The rules are the same (csrc/rules). adam, lamb and lars without a trust ratio use decoupled weight decay (AdamW);
momentum adds the decay to the gradient and takes the first gradient as it is; lion. States use bitsandbytes' maps and
blocks, so a state dict can be exchanged in both directions. There are two differences: a code is the nearest one, while
bitsandbytes' CPU kernel looks it up in 65,536 bins and turns an exact 0 into 2e-5 of its block; and no float copy of p,
g or a state is made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.ops.fakes import FLOATS
from lowbit.ops.optim import Step, StepLists, take
from lowbit.peers.bitsandbytes_codes import is_signed_map

BLOCK_SIZE = 256
_RULES = {"adam": "adamw", "lamb": "adamw", "momentum": "sgd", "lars": "sgd", "lion": "lion"}
_MOST_STEPS = 2**24  # lowbit's step counts are float32


def optimizer_update_8bit_blockwise(theirs: Callable[[], None], optimizer_name: str, g: Tensor, p: Tensor,
                                    state1: Tensor, state2: Tensor | None, beta1: float, beta2: float, beta3: float,
                                    alpha: float, eps: float, step: int, lr: float, qmap1: Tensor,
                                    qmap2: Tensor | None, absmax1: Tensor, absmax2: Tensor | None, weight_decay: float,
                                    gnorm_scale: float, skip_zeros: bool = False) -> None:  # fmt: skip
    """Take a step with 8-bit moments: the first uses the signed dynamic map, the second the unsigned one."""
    states = [state1] if state2 is None else [state1, state2]
    scales = [absmax1] if absmax2 is None else [absmax1, absmax2]
    maps = is_signed_map(qmap1) is True and (qmap2 is None or is_signed_map(qmap2) is False)
    if not maps or not _serves(optimizer_name, [p, g, *states], states, torch.uint8, beta1, step):
        return theirs()
    hyper = _hyper(optimizer_name, beta1, beta2, eps, weight_decay)
    _take(optimizer_name, "dynamic8", p, g, states, scales, lr, step, gnorm_scale, hyper)


def optimizer_update_32bit(theirs: Callable[[], None], optimizer_name: str, g: Tensor, p: Tensor, state1: Tensor,
                           state2: Tensor | None, unorm_vec: Tensor | None, max_unorm: float, param_norm: float,
                           beta1: float, beta2: float, beta3: float, alpha: float, eps: float, weight_decay: float,
                           step: int, lr: float, gnorm_scale: float, skip_zeros: bool = False) -> None:  # fmt: skip
    """Take a step with float32 moments. A step with a trust ratio is left to bitsandbytes."""
    states = [state1] if state2 is None else [state1, state2]
    if max_unorm > 0 or not _serves(optimizer_name, [p, g, *states], states, torch.float32, beta1, step):
        return theirs()
    hyper = _hyper(optimizer_name, beta1, beta2, eps, weight_decay)
    _take(optimizer_name, "float32", p, g, states, [], lr, step, gnorm_scale, hyper)


def _serves(
    name: str, tensors: list[Tensor], states: list[Tensor], dtype: torch.dtype, beta1: float, step: int
) -> bool:
    rule = _RULES.get(name)
    return (
        rule is not None
        and len(states) == (2 if rule == "adamw" else 1)
        and not (rule == "sgd" and beta1 == 0)  # without momentum, only bitsandbytes keeps a state (the last gradient)
        and 1 <= step <= _MOST_STEPS
        and all(tensor.is_contiguous() for tensor in tensors)
        and all(state.dtype == dtype and state.shape == tensors[0].shape for state in states)
        and tensors[0].dtype in FLOATS
        and tensors[1].dtype in FLOATS
        and tensors[0].shape == tensors[1].shape
    )


def _hyper(name: str, beta1: float, beta2: float, eps: float, weight_decay: float) -> dict[str, float | bool]:
    if _RULES[name] == "sgd":
        return {"momentum": beta1, "weight_decay": weight_decay}
    hyper: dict[str, float | bool] = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay}
    return hyper | {"decoupled": True} | ({"eps": eps} if _RULES[name] == "adamw" else {})


def _take(name: str, state_format: str, p: Tensor, g: Tensor, states: list[Tensor], scales: list[Tensor], lr: float,
          step: int, gnorm_scale: float, hyper: dict[str, float | bool]) -> None:  # fmt: skip
    gradient = g if gnorm_scale == 1 else g.float() * gnorm_scale
    lists = StepLists(
        [p.detach()], [gradient.detach()], [[state] for state in states], [[scale] for scale in scales],
        [torch.tensor(step - 1, dtype=torch.float32, device="cpu")],
    )  # fmt: skip
    take([Step(_RULES[name], state_format, BLOCK_SIZE, lists, lr, hyper)])
