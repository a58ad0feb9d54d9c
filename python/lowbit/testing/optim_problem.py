# SPDX-License-Identifier: Apache-2.0
"""One step of an optimizer in the middle of training, with its float64 result."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit.reference import optim as reference
from lowbit.testing.cases import HYPER, ROUNDOFF, Moment, assert_within, moments_of, run_optim

RULES = {
    "adamw": HYPER | dict(weight_decay=0.1),
    "adam": HYPER | dict(weight_decay=0.1, decoupled=False, maximize=True),
    "amsgrad": HYPER | dict(amsgrad=True, beta1=0.0),
    "sgd": HYPER | dict(weight_decay=0.1, decoupled=False),
    "sgd-nesterov": HYPER | dict(nesterov=True, decoupled=False),
    "sgd-dampening": HYPER | dict(dampening=0.3, decoupled=False, maximize=True),
    "sgd-plain": HYPER | dict(momentum=0.0, weight_decay=0.1, decoupled=False),
    "lion": HYPER | dict(weight_decay=0.1, lr=1e-3),
    "muon": HYPER,
    "muon-nesterov": HYPER | dict(nesterov=True, maximize=True),
}


def rule_of(name: str) -> str:
    return "adamw" if name in ("adam", "amsgrad") else name.partition("-")[0]


class Problem:
    """Random parameters, gradients and moments in the middle of training. `run` runs the op, `wanted` returns the
    float64 result, and `check_against` compares them."""

    def __init__(
        self,
        name: str,
        format: str,
        block_size: int,
        numels: tuple[int, ...],
        dtypes: list[tuple[str, str]],
        seed: int = 0,
        step: float = 4,
    ) -> None:
        self.rule, self.hyper, self.format, self.block_size = rule_of(name), RULES[name], format, block_size
        random = torch.Generator().manual_seed(seed)
        pairs = [dtypes[i % len(dtypes)] for i in range(len(numels))]
        magnitude = [10.0 ** -(i % 5) for i in range(len(numels))]
        self.params = [
            torch.randn(n, generator=random).to(getattr(torch, p)) for n, (p, _) in zip(numels, pairs, strict=True)
        ]
        self.grads = [
            (torch.randn(n, generator=random) * scale).to(getattr(torch, g))
            for n, scale, (_, g) in zip(numels, magnitude, pairs, strict=True)
        ]
        self.moments = []
        for signed in moments_of(self.rule, self.hyper).values():
            values = [torch.randn(n, generator=random) * scale for n, scale in zip(numels, magnitude, strict=True)]
            values = values if signed else [value**2 + value.abs().amax() ** 2 * 1e-4 for value in values]
            self.moments.append([Moment.of(value, format, signed, block_size) for value in values])
        self.steps = [torch.tensor(float(step + i % 3)) for i in range(len(numels))]

    def run(self, row: str | None = None, **arguments: object) -> None:
        run_optim(self.rule, self.params, self.grads, self.moments, self.steps, self.hyper, format=self.format,
                  block_size=self.block_size, row=row, **arguments)  # fmt: skip

    def to(self, device: str) -> None:
        """Move everything to a device."""
        for tensors in (self.params, self.grads, self.steps):
            tensors[:] = [tensor.to(device) for tensor in tensors]
        for moment in (moment for each in self.moments for moment in each):
            moment.state = moment.state.to(device)
            moment.scale = None if moment.scale is None else moment.scale.to(device)

    def everything(self) -> list[Tensor]:
        moments = [t for each in self.moments for moment in each for t in (moment.state, moment.scale) if t is not None]
        return [t.clone() for t in (*self.params, *moments, *self.steps)]

    def wanted(self) -> list[tuple[Tensor, Tensor, list[Tensor], list[Tensor]]]:
        """Return, for each parameter, its new value with the allowed error, and the new moments with the allowed error
        of computing each."""
        u, results = ROUNDOFF["float32"], []
        for index, (param, grad) in enumerate(zip(self.params, self.grads, strict=True)):
            p, g = param.double(), grad.double()
            if self.hyper["maximize"]:
                g = -g
            old = [each[index].decode() for each in self.moments]
            step = int(self.steps[index]) + 1
            p_new, new = reference.RULES[self.rule](p, g, old, step, self.hyper)
            total_g = g.abs() + (0 if self.hyper["decoupled"] else self.hyper["weight_decay"] * p.abs())
            magnitudes = [total_g + old[0].abs()] if old else []
            magnitudes += [total_g**2 + sum(m.abs() for m in old[1:])] * len(old[1:])
            errors = [12 * u * magnitude for magnitude in magnitudes]
            # An update is a product of at most 16 roundings. The moment in its numerator may cancel, so its error is
            # added separately.
            if self.rule == "adamw":
                variance = new[-1]
                denominator = variance.sqrt() / math.sqrt(1 - self.hyper["beta2"] ** step) + self.hyper["eps"]
                rate = self.hyper["lr"] / (1 - self.hyper["beta1"] ** step) / denominator
                variance_error = max(errors[1:], key=lambda error: error.amax())
                # sqrt halves the relative error of v. Only g and the first moment can cancel: the terms of v are
                # positive.
                error = rate * errors[0] + rate * new[0].abs() * (16 * u + variance_error / variance.clamp(min=1e-45))
            elif self.rule == "sgd":
                error = self.hyper["lr"] * (16 * u * total_g + 2 * sum(errors))
            elif self.rule == "muon":
                error = 4 * sum(errors)
            else:  # if the average is within its rounding error of zero, its sign may be either
                average = self.hyper["beta1"] * old[0] + (1 - self.hyper["beta1"]) * g
                error = torch.where(average.abs() <= errors[0], 2 * self.hyper["lr"], 2 * u * self.hyper["lr"])
            dtype = str(param.dtype).removeprefix("torch.")
            error = error + 4 * u * p.abs()
            smallest = torch.finfo(param.dtype).smallest_normal * ROUNDOFF[dtype]
            results.append((p_new, error + ROUNDOFF[dtype] * (p_new.abs() + error) + smallest, new, errors))
        return results

    def check_against(self, wanted: list[tuple[Tensor, Tensor, list[Tensor], list[Tensor]]], what: str) -> None:
        for index, (p, allowed, moments, errors) in enumerate(wanted):
            where = f"{what} tensor {index} [{p.numel()}] {self.params[index].dtype} {self.grads[index].dtype}"
            assert_within(self.params[index], p, allowed, where)
            for k, (values, error) in enumerate(zip(moments, errors, strict=True)):
                moment = self.moments[k][index]
                allowed = moment.rounding(values) + 2 * error + largest_error(moment, error)
                assert_within(moment.decode(), values, allowed, f"{where} moment {k}")


def largest_error(moment: Moment, error: Tensor) -> Tensor:
    """Return the error of a block's elements that is caused by the error of the largest one, and so of the scale."""
    if moment.scale is None:
        return torch.zeros_like(error)
    worst = reference.blocks(error, moment.block_size).amax(1)
    return worst.repeat_interleave(moment.block_size)[: error.numel()]
