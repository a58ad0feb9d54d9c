# SPDX-License-Identifier: Apache-2.0
"""SharedInputs: the input moments of many layers, summed once for layers that are called with the same tensor."""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from lowbit.quant.input_moments import InputMoments


@dataclass(slots=True)
class _Call:
    """The last tensor that was counted, its moments, and the matrices that were called with it."""

    x: Tensor
    version: int
    moments: InputMoments
    matrices: list[Hashable]


@dataclass(slots=True)
class SharedInputs:
    """Sums over the inputs of matrices, each of which is named by a key.

    The projections of an attention, or gate and up of an MLP, are called one after another with the same tensor. Its
    moments are summed once, under the keys of all of them.
    """

    sums: dict[tuple[Hashable, ...], InputMoments] = field(default_factory=dict)
    last: _Call | None = None

    def add(self, matrix: Hashable, k: int, products: bool, x: Tensor, picked: Tensor | None = None) -> None:
        """Count the rows of ``x [..., k]`` as inputs of a matrix.

        Args:
            matrix: the key of the matrix.
            k: the number of input channels.
            products: whether x x^T is summed too.
            x: the inputs.
            picked: which rows of ``x [r, k]`` are counted; None counts all.
        """
        if picked is not None:
            self.sums.setdefault((matrix,), InputMoments.zero(k, products)).add(x, picked)
            return
        last = self.last
        knows_changes = not x.is_inference()  # an inference tensor does not tell whether it was changed since
        if last is not None and last.x is x and knows_changes and last.version == x._version:
            last.matrices.append(matrix)
            return
        self.finish_call()
        moments = InputMoments.zero(k, products)
        moments.add(x.to(moments.squares.device))
        if knows_changes:
            self.last = _Call(x, x._version, moments, [matrix])
        else:
            self._count((matrix,), moments)

    def finish_call(self) -> None:
        """Forget the last tensor, whose moments are counted now."""
        if self.last is not None:
            self._count(tuple(self.last.matrices), self.last.moments)
            self.last = None

    def _count(self, matrices: tuple[Hashable, ...], moments: InputMoments) -> None:
        known = self.sums.get(matrices)
        if known is None:
            self.sums[matrices] = moments
        else:
            known.include(moments)

    def moments(self) -> dict[Hashable, InputMoments]:
        """Return the moments of each matrix that was called. Matrices that were always called together share one
        object."""
        self.finish_call()
        parts: dict[Hashable, list[int]] = {}
        each = [*self.sums.items()]
        for number, (matrices, _) in enumerate(each):
            for matrix in matrices:
                parts.setdefault(matrix, []).append(number)
        joined: dict[tuple[int, ...], InputMoments] = {}
        for numbers in map(tuple, parts.values()):
            if numbers not in joined:
                joined[numbers] = functools.reduce(operator.add, (each[number][1] for number in numbers))
        return {matrix: joined[tuple(numbers)] for matrix, numbers in parts.items()}
