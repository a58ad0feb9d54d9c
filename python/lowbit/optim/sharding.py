# SPDX-License-Identifier: Apache-2.0
"""State of DTensor parameters (FSDP2, tensor parallelism): a step sees local shards, a checkpoint sees DTensors.

Blocks never cross shards. Values and 8-bit codes shard as their parameter. Scales and 4-bit codes, which do not have
the parameter's shape, are one row per shard, padded to the largest, of a global ``[shards, largest]``:
torch.distributed.checkpoint then refuses another number of shards by its shape, where the blocks would not fit.
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
    """Return the local shard of a DTensor, any other tensor as it is."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def like(param: Tensor, state: Tensor) -> Tensor:
    """Return a local state of the parameter's shape as a DTensor like the parameter, or as it is."""
    if not is_dtensor(param):
        return state
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        state, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def row_like(param: Tensor, state: Tensor, count_of: Callable[[int], int]) -> Tensor:
    """Return a local flat state as this shard's row of a DTensor, or as it is.

    Args:
        param: the parameter, of which the state describes the local shard.
        state: ``[count_of(numel of the shard)]``.
        count_of: entries of a shard with that many elements.
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
    """Return the values (or codes) and scales of the local part of a moment: the tensors themselves, or views
    of a DTensor's."""
    if not is_dtensor(values):
        return values, scale
    values = local(values)
    if layout.state_format == "dynamic4":
        values = values.view(-1)[: nibble_bytes(layout.numel)]
    return values, None if scale is None else local(scale).view(-1)[: layout.scales]
