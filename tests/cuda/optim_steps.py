# SPDX-License-Identifier: Apache-2.0
"""One step over tensors of every dtype and of odd sizes, on any device, by a row of choice."""

from __future__ import annotations

import torch
from settings import forced

from lowbit import _C
from lowbit.testing import HYPER, Moment, moments_of

RULES = {name: HYPER for name in _C.OPTIM_RULES} | {
    "adamw": HYPER | dict(weight_decay=0.1),
    "amsgrad": HYPER | dict(amsgrad=True, decoupled=False, weight_decay=0.1, maximize=True),
    "sgd": HYPER | dict(nesterov=True, dampening=0.0),
    "plain": HYPER | dict(momentum=0.0),
    "lion": HYPER | dict(weight_decay=0.1, lr=1e-3),
}
NUMELS = (1, 7, 33, 256, 4099, 4099, 4099, 4099)
FLOAT32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = ((FLOAT32, FLOAT32), (BF16, BF16), (FP16, FLOAT32), (FLOAT32, FP16))  # of parameter and gradient: a kernel for each


def tensors(
    rule: str, hyper: dict[str, float], format: str, block_size: int, numels: tuple[int, ...] = NUMELS, dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = DTYPES
) -> list[list[torch.Tensor]]:
    random = torch.Generator().manual_seed(3)
    params, grads = ([torch.randn(n, generator=random).to(dtypes[i % len(dtypes)][which]) for i, n in enumerate(numels)] for which in (0, 1))
    moments = []
    for signed in moments_of(rule, hyper).values():
        values = [torch.randn(n, generator=random) for n in numels]
        moments.append([Moment.of(v if signed else v * v + 1e-3, format, signed, block_size) for v in values])
    coded = format not in ("float32", "bfloat16")
    states = [moment.state for each in moments for moment in each]
    scales = [moment.scale for each in moments for moment in each] if coded else []
    return [params, grads, states, scales, [torch.tensor(float(4 + i)) for i in range(len(numels))]]


def placed(tensor: torch.Tensor, device: str, first: int) -> torch.Tensor:
    """A copy whose memory begins at element `first` of an allocation."""
    whole = torch.cat([tensor.new_zeros(first), tensor.flatten()]).to(device)
    return whole[first:].view(tensor.shape)


def step(
    row: str, name: str, format: str, block_size: int, device: str, numels: tuple[int, ...] = NUMELS, first: int = 0,
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = DTYPES, **more: object,
) -> list[torch.Tensor]:  # fmt: skip
    rule = {"amsgrad": "adamw", "plain": "sgd"}.get(name, name)
    lists = [[placed(t, device, first) for t in each] for each in tensors(rule, RULES[name], format, block_size, numels, dtypes)]
    params, grads, states, scales, steps = lists
    by_moment = [states[i : i + len(numels)] for i in range(0, len(states), len(numels))]
    scales = [scales[i : i + len(numels)] for i in range(0, len(scales), len(numels))]
    more = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in more.items()}
    with forced(row):
        _C.OptimStep(_C.OPTIM_RULES[rule]["number"], _C.STATE_FORMATS[format], block_size, params, grads, by_moment, scales, steps,
                     dict(RULES[name]), **more).run()  # fmt: skip
    return [tensor.cpu() for each in lists for tensor in each]
