# SPDX-License-Identifier: Apache-2.0
"""InputMoments: sums over the inputs x [k] of a linear layer, which weigh the errors of its weight.

An error e of a weight [n, k] changes the layer's output by x e^T, whose mean square is e^T H e with H = mean of x x^T.
The diagonal of H, the mean of x^2 per input channel, is the importance that a scale search weighs errors by; GPTQ needs
the whole of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class InputMoments:
    """Sums over the rows that a layer was given.

    Args:
        rows: the number of rows.
        squares: float64 ``[k]``, the sum of x^2.
        products: float32 ``[k, k]``, the sum of x x^T; None where it was not asked for.
    """

    rows: int
    squares: Tensor
    products: Tensor | None = None

    @classmethod
    def zero(cls, k: int, products: bool) -> InputMoments:
        """Return those of no rows, on the CPU; ``products``: whether x x^T is summed too."""
        squares = torch.zeros(k, dtype=torch.float64, device="cpu")
        return cls(0, squares, squares.new_zeros(k, k, dtype=torch.float32) if products else None)

    @property
    def importance(self) -> Tensor:
        """The mean of x^2, float32 ``[k]``."""
        return (self.squares / max(self.rows, 1)).float()

    @property
    def hessian(self) -> Tensor | None:
        """The mean of x x^T, float32 ``[k, k]``."""
        return None if self.products is None else self.products / max(self.rows, 1)

    @property
    def stored(self) -> tuple[int, Tensor, Tensor | None]:
        """What a file holds: the arguments of this class."""
        return self.rows, self.squares, self.products

    def add(self, x: Tensor) -> None:
        """Count the rows of ``x [..., k]``."""
        rows = x.detach().reshape(-1, len(self.squares)).float()
        self.rows += len(rows)
        self.squares += rows.square().sum(0, dtype=torch.float64)
        if self.products is not None:
            self.products.addmm_(rows.T, rows)

    def blended(self, others: InputMoments, rows: int) -> InputMoments:
        """Return these with so many average rows of ``others`` added: few rows say little, none at all nothing."""
        products = None
        if self.products is not None and others.products is not None:
            products = self.products + others.products * (rows / max(others.rows, 1))
        return InputMoments(self.rows + rows, self.squares + others.squares * (rows / max(others.rows, 1)), products)

    def __add__(self, other: InputMoments) -> InputMoments:
        """Return the sums over the rows of both."""
        both = None if self.products is None or other.products is None else self.products + other.products
        return InputMoments(self.rows + other.rows, self.squares + other.squares, both)
