# SPDX-License-Identifier: Apache-2.0
"""Keys and values of multi-head latent attention, as the latent vectors that they are projected from.

Head h of a token with latent vector c and rotated key r has the key [K_h c, r] and the value V_h c. So its score with a
query [q, p] is (K_h^T q) c + p r, and the sum of values is V_h of the sum of latent vectors: attention whose queries are
projected instead of the keys, and that has one head of keys. It is the faster form for a few queries, which otherwise
have to project all tokens of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.spec import StoredWeight
from lowbit.models.growing_cache import side_by_side
from lowbit.ops.gather_linear import gather_linear
from lowbit.ops.linear import LinearArgs

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
FEW = 16
"""The max number of queries that are projected. Projecting the keys takes fewer operations from about 170 queries on,
and these are faster ones: a product of many rows."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A matrix for each head, packed ``[heads, n, k]``."""

    packed: Tensor
    stored: StoredWeight

    @property
    def op_args(self) -> LinearArgs:
        """The numbers that describe one matrix to ops."""
        return self.stored.spec.op_args(self.stored.n, self.stored.k)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[B, heads, L, n]``, the product of each head's matrix and its rows of x ``[B, heads, L, k]``."""
        batch, heads, length, k = x.shape
        rows = x.transpose(1, 2).reshape(batch * length, heads, k)
        index = torch.arange(heads, dtype=torch.int32, device="cpu").expand(batch * length, heads)
        y = gather_linear(rows, self.packed, index, self.op_args)
        return y.view(batch, length, heads, -1).transpose(1, 2)


class LatentStates:
    """The keys and the values of all heads, in place of two tensors, in one call of the attention function.

    Args:
        latents: ``[B, 1, S, rank]``.
        rotated: the rotated keys, ``[B, 1, S, columns]``.
        to_queries: K_h^T, ``[heads, rank, columns of a key that are not rotated]``.
        to_values: V_h, ``[heads, columns of a value, rank]``.
        expand: returns the keys ``[B, heads, S, E]`` and values ``[B, heads, S, Ev]`` for latents and rotated keys.
    """

    def __init__(
        self, latents: Tensor, rotated: Tensor, to_queries: HeadWeights, to_values: HeadWeights, expand: Expand
    ) -> None:
        self.latents, self.rotated, self.expand = latents, rotated, expand
        self.to_queries, self.to_values = to_queries, to_values
        batch, _, length, _ = latents.shape
        columns = to_queries.stored.k + rotated.shape[-1]
        self.shape = torch.Size((batch, to_queries.stored.experts, length, columns))
        self.dtype, self.device = latents.dtype, latents.device

    def with_queries(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Return queries, keys and values as an attention function takes them, and whether the values are latent."""
        if query.shape[2] > FEW:
            return query, *self.expand(self.latents, self.rotated), False
        kept, turned = query.split([self.to_queries.stored.k, self.rotated.shape[-1]], dim=-1)
        keys = side_by_side(self.latents, self.rotated)
        if keys is None:
            keys = torch.cat([self.latents, self.rotated], dim=-1)
        return torch.cat([self.to_queries(kept), turned], dim=-1), keys, keys[..., : self.latents.shape[-1]], True
