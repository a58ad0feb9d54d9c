# SPDX-License-Identifier: Apache-2.0
"""InputMoments: sums over the inputs x [k] of a linear layer, used to weight the errors of its weight.

An error e [k] in a row of the weight changes the output by e^T x, whose mean square is e^T H e with H = mean of x x^T.
A scale search weights errors by the diagonal of H, the mean of x^2 per input channel (the importance). GPTQ needs the
whole matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
"""Channels of a product x x^T that are computed at once; the half below the diagonal is copied."""


class InputMoments:
    """Sums over the input rows of a layer.

    Up to k rows are kept as they are: they take less memory than their products, which are then computed once, and not
    for each batch.

    Args:
        rows: the number of rows.
        squares: float64 ``[k]``, the sum of x^2.
        products: float32 ``[k, k]``, the sum of x x^T; None if it was not requested.
    """

    __slots__ = ("_held", "_products", "rows", "squares")

    def __init__(self, rows: int, squares: Tensor, products: Tensor | None = None) -> None:
        self.rows, self.squares, self._products = rows, squares, products
        self._held: list[Tensor] | None = None if products is None else []  # rows whose products are not summed yet

    @classmethod
    def zero(cls, k: int, products: bool) -> InputMoments:
        """Return the moments of zero rows, on the CPU.

        Args:
            k: the number of input channels.
            products: whether x x^T is summed too.
        """
        moments = cls(0, torch.zeros(k, dtype=torch.float64, device="cpu"))
        moments._held = [] if products else None
        return moments

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
        rows = torch.cat(self._held) if self._held else self.squares.new_zeros(0, k, dtype=torch.float32)
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

    def add(self, x: Tensor) -> None:
        """Add the rows of ``x [..., k]``."""
        rows = x.detach().reshape(-1, len(self.squares)).float()
        self.rows += len(rows)
        self.squares += rows.square().sum(0, dtype=torch.float64)
        self._hold([rows.clone() if rows.data_ptr() == x.data_ptr() else rows])

    def _hold(self, rows: list[Tensor]) -> None:
        if self._held is not None:
            self._held = [*self._held, *rows]
            if sum(map(len, self._held)) > len(self.squares):
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
        products = self.products + others.products * part if self.has_products and others.has_products else None
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
