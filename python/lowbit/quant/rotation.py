# SPDX-License-Identifier: Apache-2.0
"""Orthogonal matrices R [d, d] that spread the values of single channels over all channels.

All entries of a normalized Hadamard matrix are +-1 / sqrt(d), so every channel of x contributes equally to each channel
of x R. R is a Kronecker product of small matrices and is applied factor by factor, with d * (the sum of their orders)
multiplications per row instead of d^2. Such a matrix of order d = 2^s * odd exists if one of Paley's constructions
gives a matrix of order 2^t * odd with t <= s:

    order q + 1,    q a prime, q % 4 == 3
    order 2(q + 1), q a prime, q % 4 == 1

which holds for the width of every common model (576 = 16 * 36, 896 = 32 * 28, 3584 = 128 * 28). For other widths, the
factor for the odd part is a random orthogonal matrix. The signs of the channels are random (QuaRot, Ashkboos et al.,
arXiv 2404.00456).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("hadamard", "orthogonal")
LARGEST = 64
"""Max order of a factor that is a power of two: small factors need fewer multiplications, large ones fewer passes."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation x -> x R with R = diag(signs) kron(F1, F2, ...), the Kronecker product of the factors.

    Args:
        name: the name of the rotation, for reports.
        signs: float64 ``[d]`` of +-1.
        factors: float64 orthogonal matrices, the product of whose orders is d.
    """

    name: str
    signs: Tensor
    factors: tuple[Tensor, ...]

    def turn(self, x: Tensor) -> Tensor:
        """Return ``x [..., d]`` times R, in float64."""
        y = x.double() * self.signs.to(x.device)
        for factor in reversed(self.factors):  # each factor multiplies the last axis and moves it to the front
            y = y.reshape(*x.shape[:-1], -1, len(factor)) @ factor.to(x.device)
            y = y.transpose(-1, -2)
        return y.reshape(x.shape)

    def matrix(self) -> Tensor:
        """Return R, float64 ``[d, d]``."""
        return self.turn(torch.eye(len(self.signs), dtype=torch.float64, device="cpu"))


def rotation(kind: str, width: int, generator: torch.Generator) -> Rotation:
    """Return a random rotation of ``width`` channels.

    Args:
        kind: "hadamard", or "orthogonal" for a random orthogonal matrix (from the QR decomposition of normal numbers).
        width: the number of channels.
        generator: a torch.Generator on the CPU.
    """
    if kind == "orthogonal":
        signs = torch.ones(width, dtype=torch.float64, device="cpu")
        return Rotation(f"orthogonal {width}", signs, (_random(width, generator),))
    signs = torch.randint(0, 2, (width,), generator=generator, device="cpu").double() * 2 - 1
    factors, names, two = [], [], width & -width  # the largest power of two in the width
    if two != width:
        order = next((order for order in _orders(width // two, two) if _paley(order) is not None), width // two)
        known = _paley(order)
        factors.append(_random(order, generator) if known is None else known / math.sqrt(order))
        names.append(f"{order}" if known is not None else f"orthogonal {order}")
        two = width // order
    while two > 1:
        factors.append(_sylvester(min(two, LARGEST)))
        names.append(f"{len(factors[-1])}")
        two //= len(factors[-1])
    one = (torch.ones(1, 1, dtype=torch.float64, device="cpu"),)
    return Rotation(f"hadamard {' x '.join(names) or 1}", signs, tuple(factors) or one)


def _orders(odd: int, two: int) -> list[int]:
    return [odd * 2**power for power in range(2, two.bit_length())]


def _random(order: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(order, order, dtype=torch.float64, generator=generator, device="cpu")
    q, r = torch.linalg.qr(normal)
    return (q * r.diagonal().sign()).contiguous()  # without the signs, the distribution is not uniform


def _sylvester(order: int) -> Tensor:
    """Return Sylvester's Hadamard matrix of an order that is a power of two, divided by the order's square root."""
    h = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(h) < order:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu"), h)
    return h / math.sqrt(order)


def _paley(order: int) -> Tensor | None:
    """Return Paley's Hadamard matrix of +-1 of this order, or None if it is not given by a prime."""
    if order % 4 == 0 and _is_prime(order - 1):  # then (order - 1) % 4 == 3
        residues = _bordered(order - 1)
        residues[1:, 0] = -1  # skew
        return residues + torch.eye(order, dtype=torch.float64, device="cpu")
    q = order // 2 - 1
    if order % 4 == 0 and q % 4 == 1 and _is_prime(q):
        one = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
        zero = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64, device="cpu")
        eye = torch.eye(q + 1, dtype=torch.float64, device="cpu")
        return torch.kron(_bordered(q), one) + torch.kron(eye, zero)
    return None


def _bordered(q: int) -> Tensor:
    """Return the Jacobsthal matrix of the prime q with a border of ones, ``[q + 1, q + 1]``.

    Its entry (i, j) is 1 if i - j is a square modulo q, -1 if not, and 0 for i = j.
    """
    squares = {number * number % q for number in range(1, q)}
    values = [0.0, *(1.0 if number in squares else -1.0 for number in range(1, q))]
    signs = torch.tensor(values, dtype=torch.float64, device="cpu")
    places = torch.arange(q, device="cpu")
    result = torch.ones(q + 1, q + 1, dtype=torch.float64, device="cpu")
    result[0, 0] = 0
    result[1:, 1:] = signs[(places[:, None] - places) % q]
    return result


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
