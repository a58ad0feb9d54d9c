# SPDX-License-Identifier: Apache-2.0
"""PermutedLinear, a `QuantLinear` whose packed columns are in another order than its inputs.

A group of a weight is a set of neighbouring columns. GPTQ with act order (``desc_act``) chooses the columns of a group
by their importance instead. Sorted by group they are neighbours, and the inputs follow them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats.spec import StoredWeight
from lowbit.ops.other_inputs import of_nested
from lowbit.quant.kinds import become_packed, twin_of
from lowbit.quant.quant_linear import QuantLinear

PERMUTATION = "permutation"
"""Name of the buffer in a state dict, next to the packed weight."""


class PermutedLinear(QuantLinear):
    """A linear layer that reads its inputs in another order: ``y = x[..., permutation] @ packed.T + bias``.

    The buffer ``permutation``, int64 ``[k]``, has the input of each packed column. `dequantize` gives the weight in the
    order of the inputs; `unpack` gives codes in the order in which they are packed.
    """

    permutation: Tensor

    def forward(self, x: Tensor) -> Tensor:
        permutation = self.__dict__["_buffers"].get(PERMUTATION)
        if permutation is None or not isinstance(x, Tensor):  # another thread dequantizes the layer; or an error
            return super().forward(x)
        if x.is_nested:
            return of_nested(self.forward, x)
        if x.dim() == 0 or x.shape[-1] != len(permutation):
            return super().forward(x)  # raises the op's error
        return super().forward(x.index_select(-1, permutation))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return super().dequantize(dtype)[:, self.permutation.argsort()]

    def in_packed_order(self, weight: Tensor) -> Tensor:
        """Return a float weight ``[n, k]`` with its columns in the order in which they are packed."""
        return weight[:, self.permutation]

    def state_dict_problem(self, state_dict: Mapping[str, Any], prefix: str) -> str | None:
        problem, permutation = super().state_dict_problem(state_dict, prefix), state_dict.get(f"{prefix}{PERMUTATION}")
        if problem is None and isinstance(permutation, Tensor):
            problem = permutation_problem(permutation, self.in_features)
            problem = problem and f"{prefix}{PERMUTATION} must be {problem}"
        return problem

    @property
    def stored(self) -> StoredWeight:
        raise ValueError(
            "stored: the layer must read its inputs in their order for lowbit.linear, got a permutation of them (act "
            "order of GPTQ); call the layer"
        )


def hold_permutation(layer: nn.Module, permutation: Tensor) -> None:
    """Turn a `QuantLinear` into a `PermutedLinear` with this permutation, which may be on the meta device, in place."""
    twin = twin_of(layer, PermutedLinear)
    twin._buffers[PERMUTATION] = permutation
    float_class = layer.float_class
    become_packed(layer, twin)
    layer.float_class = float_class


def permutation_problem(permutation: Any, k: int) -> str | None:
    """Return why a tensor is no permutation of k inputs, or None."""
    if permutation.dtype != torch.int64 or list(permutation.shape) != [k]:
        return f"int64 [{k}], got {str(permutation.dtype).removeprefix('torch.')} {list(permutation.shape)}"
    if not permutation.is_meta and not torch.equal(
        permutation.sort().values, torch.arange(k, device=permutation.device)
    ):
        return f"each of 0..{k - 1} once, got other numbers"
    return None
