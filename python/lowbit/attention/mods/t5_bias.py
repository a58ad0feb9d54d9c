# SPDX-License-Identifier: Apache-2.0
"""T5's relative position bias (arXiv 1910.10683): a learned value per head and bucket of distances. Buckets get wider
with the distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit.score.mod import ScoreMod


def t5_bias(table: Tensor, *, max_distance: int = 128, bidirectional: bool = True) -> ScoreMod:
    """Return the mod ``score + table[bucket(k - q), h]``.

    Args:
        table: ``[buckets, H]``, as transformers' ``relative_attention_bias.weight``; it may require grad.
        max_distance: the distance from which on all keys share the last bucket.
        bidirectional: if True, half of the buckets are for keys after the query (encoder); if False, such keys count as
            distance 0 (decoder).

    Raises:
        ValueError: table is not ``[buckets, H]``, or max_distance is within the buckets of single distances.
    """
    if table.dim() != 2:
        raise ValueError(f"t5_bias: table must have shape [buckets, H], got {list(table.shape)}")
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = buckets // 2  # the first half of the buckets have one distance each
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"t5_bias: max_distance must be above {exact} for {table.shape[0]} buckets, got max_distance={max_distance}"
        )
    per_octave = (buckets - exact) / math.log(max_distance / exact)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        offset = kv_idx - q_idx
        distance = offset.abs() if bidirectional else (-offset).clamp(min=0)
        far_off = distance.clamp(min=1).to(torch.float32)  # independent of torch's default dtype
        far = exact + (torch.log(far_off / exact) * per_octave).to(torch.int32)
        bucket = torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
        if bidirectional:
            bucket = bucket + torch.where(offset > 0, buckets, 0)
        return score + table[bucket, h]

    return ScoreMod(mod, f"t5_bias({table.shape[0]} buckets)")
