# SPDX-License-Identifier: Apache-2.0
"""Calls of quantize that a device must answer as the CPU does: every format, mapping and way to choose a scale, over
weights of all kinds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from settings import forced
from torch import Tensor

from lowbit import _C
from lowbit.testing.cases import empty_packed

SHAPES = ((1, 1), (17, 70), (3, 300), (21, 130), (16, 64), (40, 257))
GROUP_SIZES = {"float": (0,), "integer": (0, 32, 256), "lookup": (0, 32, 64)}
CHOICES = {
    "float": (("symmetric", "absmax"),),
    "integer": (
        ("symmetric", "absmax"), ("symmetric", "search"), ("asymmetric", "absmax"), ("asymmetric", "search"),
        ("symmetric_no_clipping_err", "absmax"),
    ),
    "lookup": (("symmetric", "absmax"), ("symmetric", "search")),
}  # fmt: skip


@dataclass(frozen=True)
class QuantizeCall:
    format: str
    group_size: int
    mapping: str
    scale: str
    weight: Tensor
    importance: Tensor | None

    def run(self, device: str, row: str) -> tuple[Tensor, Tensor]:
        """The packed bytes, all of which are written, and the three sums of squares."""
        asymmetric = self.mapping == "asymmetric"
        packed = torch.full_like(empty_packed(*self.weight.shape, self.format, self.group_size, asymmetric), 0xAB).to(device)
        importance = None if self.importance is None else self.importance.to(device)
        choice = _C.MAPPINGS[self.mapping], _C.SCALE_CHOICES[self.scale]
        with forced(row):
            sums = _C.quantize(
                self.weight.to(device), packed, _C.FORMATS[self.format], self.group_size, asymmetric, *choice, importance
            )
        return packed.cpu(), torch.tensor(sums, dtype=torch.float64)


def weights(n: int, k: int) -> Iterator[Tensor]:
    normal = torch.randn(n, k)
    yield normal
    yield normal * 10.0 ** torch.linspace(-30, 30, n)[:, None]
    yield normal * 10.0 ** torch.linspace(-12, 12, k)
    yield torch.zeros(n, k)
    yield torch.full((n, k), 0.3)
    yield normal * 1e-40
    yield normal.clamp(-3, 3) * 1e38
    yield torch.where(torch.arange(k) == k // 2, 100.0, normal)
    yield normal.abs() + 5
    yield normal * (torch.rand(n, k) > 0.9)


def calls(format: str) -> Iterator[QuantizeCall]:
    torch.manual_seed(11)
    kind = str(_C.FORMAT_FACTS[format]["kind"])
    kinds = itertools.cycle(weight for shape in SHAPES for weight in weights(*shape))
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float16))
    for group_size, (mapping, scale), weighted in itertools.product(GROUP_SIZES[kind], CHOICES[kind], (False, True)):
        for _ in range(4):
            dtype = next(dtypes)
            weight = next(kinds).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
            importance = torch.rand(weight.shape[1]) * 1e-6 if weighted and scale == "search" else None
            yield QuantizeCall(format, group_size, mapping, scale, weight, importance)


def assert_as_on_the_cpu(format: str, device: str, row: str) -> None:
    """The same bytes; sums of squares are added up in another order, and beyond float32 are inf somewhere else."""
    on_cpu = next(str(row["name"]) for row in _C.kernels("quantize") if row["available"])
    for call in calls(format):
        (packed, sums), (wanted, wanted_sums) = call.run(device, row), call.run("cpu", on_cpu)
        assert torch.equal(packed, wanted), f"{call}: bytes {(packed != wanted).nonzero()[:4].tolist()} differ"
        normal = (wanted_sums > 1e-30) & (wanted_sums < 1e30)
        assert torch.allclose(sums[normal], wanted_sums[normal], rtol=1e-4), f"{call}: {sums}, wanted {wanted_sums}"
