# SPDX-License-Identifier: Apache-2.0
"""Rotations: orthogonal, flat where a Hadamard matrix is known, applied factor by factor as by the whole matrix."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from lowbit.quant.rotation import Rotation, rotation


def made(kind: str, width: int, seed: int = 0) -> Rotation:
    return rotation(kind, width, torch.Generator().manual_seed(seed))


def orthogonal(matrix: Tensor) -> bool:
    return torch.allclose(matrix @ matrix.T, torch.eye(len(matrix), dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("width", [1, 2, 12, 20, 28, 36, 40, 64, 80, 96, 128, 576, 640, 896, 960, 1152, 1536, 2304])
def test_entries_of_a_hadamard_matrix_have_one_size(width: int) -> None:
    matrix = made("hadamard", width).matrix()
    assert orthogonal(matrix)
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, width**-0.5), atol=1e-12)


@pytest.mark.parametrize("width", [3, 6, 9, 14, 92, 376])
def test_other_widths_have_an_orthogonal_odd_part(width: int) -> None:
    made_of = made("hadamard", width)
    assert orthogonal(made_of.matrix()) and "orthogonal" in made_of.name


@pytest.mark.parametrize("width", [1, 7, 64])
def test_orthogonal_ones(width: int) -> None:
    assert orthogonal(made("orthogonal", width).matrix())


@pytest.mark.parametrize("width", [6, 36, 48, 4 * 64 * 2])
def test_factors_are_applied_as_their_kronecker_product(width: int) -> None:
    made_of = made("hadamard", width)
    product = functools.reduce(torch.kron, made_of.factors)
    x = torch.randn(2, 3, width)
    wanted = x.double() @ (made_of.signs[:, None] * product)
    got = made_of.turn(x)
    assert got.dtype is torch.float64 and torch.allclose(got, wanted, atol=1e-12)


def test_a_seed_decides() -> None:
    for kind in ("hadamard", "orthogonal"):
        assert torch.equal(made(kind, 36, 1).matrix(), made(kind, 36, 1).matrix())
        assert not torch.allclose(made(kind, 36, 1).matrix(), made(kind, 36, 2).matrix(), atol=1e-3)
