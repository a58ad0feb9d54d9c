# SPDX-License-Identifier: Apache-2.0
"""InputMoments: sums over the inputs x [k] of a linear layer, used to weight the errors of its weight.

An error e [k] in a row of the weight changes the output by e^T x, whose mean square is e^T H e with H = mean of x x^T.
A scale search weights errors by the diagonal of H, the mean of x^2 per input channel (the importance). GPTQ needs the
whole matrix.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

BLOCK = 256
"""Channels of a product x x^T that are computed at once; the half below the diagonal is copied."""
Held = tuple[Tensor, "Tensor | None"]
"""Rows ``[r, k]`` that are kept, and the numbers of those that count; None counts all of them once."""


class InputMoments:
    """Sums over the input rows of a layer.

    Up to k rows are kept as they are: they take less memory than their products, which are then computed once, and not
    for each batch. The experts of a layer keep one tensor with the rows of all of them.

    Args:
        rows: the number of rows.
        squares: float64 ``[k]``, the sum of x^2.
        products: float32 ``[k, k]``, the sum of x x^T; None if it was not requested, or all rows are kept.
        held: the rows whose products are not summed yet; None if x x^T was not requested.
    """

    __slots__ = ("_held", "_products", "rows", "squares")

    def __init__(
        self, rows: int, squares: Tensor, products: Tensor | None = None, held: Sequence[Held] | None = None
    ) -> None:
        self.rows, self.squares, self._products = rows, squares, products
        self._held: list[Held] | None = None if products is None and held is None else list(held or ())

    @classmethod
    def zero(cls, k: int, products: bool) -> InputMoments:
        """Return the moments of zero rows, on the CPU.

        Args:
            k: the number of input channels.
            products: whether x x^T is summed too.
        """
        return cls(0, torch.zeros(k, dtype=torch.float64, device="cpu"), held=[] if products else None)

    @classmethod
    def total(cls, each: Sequence[InputMoments]) -> InputMoments:
        """Return the sums over the rows of all of these moments. A kept row that several of them count is multiplied
        once."""
        has_products = all(one.has_products for one in each)
        total = cls.zero(len(each[0].squares), has_products)
        for one in each:
            total.rows += one.rows
            total.squares += one.squares
        if has_products:
            summed = [one._products for one in each if one._products is not None]
            total._products = functools.reduce(Tensor.add_, summed[1:], summed[0].clone()) if summed else None
            total._held = [*_counted(held for one in each for held in one._held)]
            total._products, total._held = total._sum(), []
        return total

    @property
    def has_products(self) -> bool:
        """Whether x x^T is summed."""
        return self._held is not None

    @property
    def products(self) -> Tensor | None:
        """The sum of x x^T, float32 ``[k, k]``; None if it was not requested. It is kept from now on."""
        if self._held is not None and (self._held or self._products is None):
            self._products, self._held = self._sum(), []
        return self._products

    @property
    def products_are_finite(self) -> bool:
        """Whether no product is inf or nan; the squares of rows that are kept bound their products."""
        held = not self._held or bool(self.squares.max() <= torch.finfo(torch.float32).max)
        return held and (self._products is None or bool(self._products.isfinite().all()))

    @property
    def importance(self) -> Tensor:
        """The mean of x^2, float32 ``[k]``."""
        return (self.squares / max(self.rows, 1)).float()

    @property
    def hessian(self) -> Tensor | None:
        """The mean of x x^T, float32 ``[k, k]``; None without ``products``."""
        return None if self._held is None else self._sum().div_(max(self.rows, 1))

    def _sum(self) -> Tensor:
        k = len(self.squares)
        rows = torch.cat([*map(_rows, self._held)]) if self._held else self.squares.new_zeros(0, k, dtype=torch.float32)
        total = rows.new_zeros(k, k) if self._products is None else self._products.clone()
        for begin in range(0, k if len(rows) else 0, BLOCK):
            end = min(begin + BLOCK, k)
            total[begin:end, begin:].addmm_(rows[:, begin:end].T, rows[:, begin:])
            total[end:, begin:end] = total[begin:end, end:].T
        return total

    @property
    def stored(self) -> tuple[int, Tensor, Tensor | None]:
        """The values that are saved to a file: the arguments of this class."""
        return self.rows, self.squares, self.products

    @property
    def stored_rows(self) -> tuple[int, Tensor, Tensor | None, list[Held] | None]:
        """The same with the rows that are kept, which take less space where they are few."""
        return self.rows, self.squares, self._products, self._held

    def add(self, x: Tensor, picked: Tensor | None = None) -> None:
        """Add the rows of ``x [..., k]``.

        Args:
            x: the rows.
            picked: int64, the numbers of the rows of ``x [r, k]`` to add; x is then kept as it is, and must not change.
        """
        rows = x if picked is not None else x.detach().reshape(-1, len(self.squares))
        if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            rows = rows.float()
        counted = _rows((rows, picked))
        self.rows += len(counted)
        self.squares += counted.square().sum(0, dtype=torch.float64)
        if self._held is not None:
            kept = rows if picked is not None or rows.data_ptr() != x.data_ptr() else rows.clone()
            self._hold([(kept, picked)])

    def _hold(self, rows: list[Held]) -> None:
        if self._held is not None:
            self._held = [*self._held, *rows]
            if sum(map(_count, self._held)) > len(self.squares):
                self._products, self._held = self._sum(), []

    def include(self, others: InputMoments) -> None:
        """Add the sums over other rows of the same layer in place."""
        self.rows += others.rows
        self.squares += others.squares
        if self._held is not None:
            if others._products is not None:
                self._products = others._products if self._products is None else self._products + others._products
            self._hold(others._held)

    def blended(self, others: InputMoments, rows: int) -> InputMoments:
        """Return these moments plus ``rows`` average rows of ``others``, which stabilizes moments of few or no rows."""
        part = rows / max(others.rows, 1)
        products = None
        if self.has_products and others.has_products:  # its own are not kept: those of all experts take too much memory
            products = self._sum().add_(others.products, alpha=part)
        return InputMoments(self.rows + rows, self.squares + others.squares * part, products)

    def in_order(self, permutation: Tensor) -> InputMoments:
        """Return the moments of the inputs ``x[..., permutation]``."""
        products = self.products[permutation][:, permutation] if self.has_products else None
        return InputMoments(self.rows, self.squares[permutation], products)

    def __add__(self, other: InputMoments) -> InputMoments:
        """Return the sums over the rows of both."""
        both = InputMoments.zero(len(self.squares), self.has_products and other.has_products)
        both.include(self)
        both.include(other)
        return both


def _rows(held: Held) -> Tensor:
    """Return the rows that count, float32."""
    rows, picked = held
    return (rows if picked is None else rows[picked]).float()


def _count(held: Held) -> int:
    rows, picked = held
    return len(rows if picked is None else picked)


def _counted(held: Iterable[Held]) -> Iterable[Held]:
    """Yield kept rows so that each of them is there once, times the root of how often it counts."""
    by_tensor: dict[int, list[Held]] = defaultdict(list)
    for one in held:
        by_tensor[id(one[0])].append(one)
    for parts in by_tensor.values():
        rows, times = parts[0][0], torch.zeros(len(parts[0][0]), device="cpu")
        for _, picked in parts:
            times += 1 if picked is None else picked.bincount(minlength=len(rows))
        yield _rows((rows, times.nonzero()[:, 0])) * times[times > 0].sqrt()[:, None], None


def bytes_after(each: Iterable[InputMoments], batches: int) -> int:
    """Return about how many bytes the moments of one batch will take after this number of batches like it."""
    products, kept = 0, dict[int, int]()
    for one in each:
        if one.has_products and one.rows * batches > len(one.squares):
            products += 4 * len(one.squares) ** 2
        else:
            kept |= {id(rows): rows.nbytes for rows, _ in one._held or ()}
    return products + batches * sum(kept.values())
