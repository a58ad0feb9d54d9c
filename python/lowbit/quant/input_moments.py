# SPDX-License-Identifier: Apache-2.0
"""InputMoments: sums over the inputs x [k] of a linear layer, used to weight the errors of its weight.

An error e [k] in a row of the weight changes the output by e^T x, whose mean square is e^T H e with H = mean of x x^T.
A scale search weights errors by the diagonal of H, the mean of x^2 per input channel (the importance). GPTQ needs the
whole matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class InputMoments:
    """Sums over the input rows of a layer.

    Args:
        rows: the number of rows.
        squares: float64 ``[k]``, the sum of x^2.
        products: float32 ``[k, k]``, the sum of x x^T; None if it was not requested.
    """

    rows: int
    squares: Tensor
    products: Tensor | None = None

    @classmethod
    def zero(cls, k: int, products: bool) -> InputMoments:
        """Return the moments of zero rows, on the CPU.

        Args:
            k: the number of input channels.
            products: whether x x^T is summed too.
        """
        squares = torch.zeros(k, dtype=torch.float64, device="cpu")
        return cls(0, squares, squares.new_zeros(k, k, dtype=torch.float32) if products else None)

    @property
    def importance(self) -> Tensor:
        """The mean of x^2, float32 ``[k]``."""
        return (self.squares / max(self.rows, 1)).float()

    @property
    def hessian(self) -> Tensor | None:
        """The mean of x x^T, float32 ``[k, k]``; None without ``products``."""
        return None if self.products is None else self.products / max(self.rows, 1)

    @property
    def stored(self) -> tuple[int, Tensor, Tensor | None]:
        """The values that are saved to a file: the arguments of this class."""
        return self.rows, self.squares, self.products

    def add(self, x: Tensor) -> None:
        """Add the rows of ``x [..., k]``."""
        rows = x.detach().reshape(-1, len(self.squares)).float()
        self.rows += len(rows)
        self.squares += rows.square().sum(0, dtype=torch.float64)
        if self.products is not None:
            self.products.addmm_(rows.T, rows)

    def include(self, others: InputMoments) -> None:
        """Add the sums over other rows of the same layer in place."""
        self.rows += others.rows
        self.squares += others.squares
        if self.products is not None:
            self.products += others.products

    def blended(self, others: InputMoments, rows: int) -> InputMoments:
        """Return these moments plus ``rows`` average rows of ``others``, which stabilizes moments of few or no rows."""
        products = None
        if self.products is not None and others.products is not None:
            products = self.products + others.products * (rows / max(others.rows, 1))
        return InputMoments(self.rows + rows, self.squares + others.squares * (rows / max(others.rows, 1)), products)

    def in_order(self, permutation: Tensor) -> InputMoments:
        """Return the moments of the inputs ``x[..., permutation]``."""
        products = None if self.products is None else self.products[permutation][:, permutation]
        return InputMoments(self.rows, self.squares[permutation], products)

    def __add__(self, other: InputMoments) -> InputMoments:
        """Return the sums over the rows of both."""
        both = None if self.products is None or other.products is None else self.products + other.products
        return InputMoments(self.rows + other.rows, self.squares + other.squares, both)
