# SPDX-License-Identifier: Apache-2.0
"""State of DTensor parameters (FSDP2, tensor parallelism): a step works on local shards, a checkpoint has DTensors.

Blocks never cross shards. Values and 8-bit codes are sharded like their parameter. Scales and 4-bit codes do not have
the parameter's shape; they are one row per shard, padded to the longest, of a global tensor ``[shards, longest]``. With
another number of shards the blocks would not fit; torch.distributed.checkpoint then rejects the different shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.optim.state_format import Layout, nibble_bytes


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether this is a DTensor, without importing torch.distributed."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor; any other tensor unchanged."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def like(param: Tensor, state: Tensor) -> Tensor:
    """Return a local state with the parameter's shape as a DTensor, or unchanged if the parameter is not a DTensor."""
    if not is_dtensor(param):
        return state
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        state, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def row_like(param: Tensor, state: Tensor, count_of: Callable[[int], int]) -> Tensor:
    """Return a flat local state as this shard's row of a DTensor, or unchanged if the parameter is not a DTensor.

    Args:
        param: the parameter; the state belongs to its local shard.
        state: ``[count_of(numel of the shard)]``.
        count_of: function that returns the number of entries for a number of elements.
    """
    if not is_dtensor(param):
        return state
    from torch.distributed.tensor import DTensor, Shard

    shards, size = 1, list(param.shape)
    for dim, placement in enumerate(param.placements):
        if placement.is_shard():
            shards *= param.device_mesh.size(dim)
            size[placement.dim] = -(-size[placement.dim] // param.device_mesh.size(dim))
    width = count_of(math.prod(size))
    row = state.new_zeros((1, width))
    row[0, : state.numel()] = state
    placements = [Shard(0) if placement.is_shard() else placement for placement in param.placements]
    return DTensor.from_local(
        row, param.device_mesh, placements, run_check=False, shape=torch.Size((shards, width)), stride=(width, 1)
    )


def local_moment(values: Tensor, scale: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Return the values (or codes) and scales of the local part of a moment: the tensors themselves, or views of the
    local tensors of DTensors."""
    if not is_dtensor(values):
        return values, scale
    values = local(values)
    if layout.state_format == "dynamic4":
        values = values.view(-1)[: nibble_bytes(layout.numel)]
    return values, None if scale is None else local(scale).view(-1)[: layout.scales]
