# SPDX-License-Identifier: Apache-2.0
"""Training with 2:4 sparsity, with torchao's names: layers that prune their weight or input in every step.

In each tile of 4 x 4 values half are kept, two in each row and two in each column. There are 90 ways to do so, of which
the one with the smallest squared error is used. So both the matrix, which the forward multiplies, and its transpose,
for the backward, are 2:4. The gradient is straight-through, so a value that was pruned may come back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.ops.fakes import FLOATS
from lowbit.quant.load_check import guard
from lowbit.quant.select import reason_to_skip
from lowbit.training.int8_linear import checked_input

_TILES_AT_ONCE = 1 << 14  # tiles per batch, whose 90 float32 sums each take 6 MB
_END = "swap_semi_sparse_linear_with_linear"


@functools.lru_cache(maxsize=1)
def _patterns() -> Tensor:
    """Return the 4 x 4 masks with two ones in each row and column, float32 ``[90, 16]``."""
    rows = [[float(i in two) for i in range(4)] for two in itertools.combinations(range(4), 2)]
    masks = torch.tensor(list(itertools.product(rows, repeat=4)), dtype=torch.float32, device="cpu")
    return masks[(masks.sum(1) == 2).all(1)].flatten(1)


def semi_sparse_mask(matrix: Tensor) -> Tensor:
    """Return the mask that is 2:4 along both dimensions and keeps the max sum of squares in each 4 x 4 tile.

    Squares are summed in float32, after dividing each tile by its max. Tiles at the border are padded with zeros.

    Args:
        matrix: ``[n, k]``, any float dtype, finite.

    Returns:
        bool ``[n, k]``.
    """
    n, k = matrix.shape
    size = functional.pad(matrix.detach().abs(), (0, -k % 4, 0, -n % 4))
    tiles = size.unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).transpose(1, 2).flatten(2)  # [n / 4, k / 4, 16]
    patterns = _patterns().to(matrix.device)
    chosen = [_best(part.float(), patterns) for part in tiles.flatten(0, 1).split(_TILES_AT_ONCE)]
    mask = torch.cat(chosen).view_as(tiles).unflatten(2, (4, 4)).transpose(1, 2).flatten(2).flatten(0, 1)
    return mask[:n, :k].contiguous()


def _best(tiles: Tensor, patterns: Tensor) -> Tensor:
    """Return for each tile ``[count, 16]`` the pattern that keeps the max sum of squares."""
    largest = tiles.amax(1, keepdim=True)
    kept = (tiles / torch.where(largest > 0, largest, 1)).square() @ patterns.T
    return patterns.bool()[kept.max(1).indices]  # max is faster than argmax


def semi_sparse(matrix: Tensor) -> Tensor:
    """Return ``matrix`` with 0 wherever `semi_sparse_mask` is False, except for inf and nan, which are kept. The
    gradient is straight-through."""
    return _SemiSparse.apply(matrix)


class _SemiSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        return torch.where(semi_sparse_mask(matrix) | ~matrix.isfinite(), matrix, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class SemiSparseLinear(nn.Linear):
    """An nn.Linear whose weight is pruned to 2:4 in every forward."""

    trained_as = "2:4 weights"
    end = f"{_END}(model)"

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        raise TypeError(
            f"{name}: swap_linear_with_semi_sparse_linear(model, {{name: {name}}}) makes one of an nn.Linear"
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(checked_input(self, x), semi_sparse(self.weight), self.bias)


class SemiSparseActivationLinear(SemiSparseLinear):
    """An nn.Linear whose input ``[..., k]`` is pruned to 2:4, in tiles of four rows and four features. Its weight stays
    dense."""

    trained_as = "2:4 activations"

    def forward(self, x: Tensor) -> Tensor:
        x = checked_input(self, x)
        return functional.linear(semi_sparse(x.reshape(-1, self.in_features)).view_as(x), self.weight, self.bias)


def swap_linear_with_semi_sparse_linear(model: nn.Module, config: Mapping[str, type[SemiSparseLinear]]) -> nn.Module:
    """Turn nn.Linear layers of ``model`` into layers that prune their weight or input to 2:4, and return ``model``.

    Layers keep their identity, parameters and hooks, so optimizers and state dicts of the float model remain valid.

    Args:
        model: any module; it is changed in place.
        config: a mapping from qualified names of nn.Linear layers to `SemiSparseLinear`, which prunes the weight, or
            `SemiSparseActivationLinear`, which prunes the input.

    Raises:
        TypeError: config is not a mapping to these classes, or a weight is not float32, bfloat16 or float16.
        ValueError: config is empty; a name is not that of an nn.Linear; other code reads its weight; or in_features or
            out_features is not a multiple of 4. The message names the layer.

    Example:
        >>> config = {"0": lowbit.training.SemiSparseLinear}
        >>> lowbit.training.swap_linear_with_semi_sparse_linear(model, config)
        >>> train(model)
        >>> lowbit.training.swap_semi_sparse_linear_with_linear(model)
        >>> lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_semi_sparse_weight(pruned=True))
    """
    function = "swap_linear_with_semi_sparse_linear"
    if not isinstance(config, Mapping):
        raise TypeError(f"{function}: config must be a dict of names and classes, got {type(config).__name__}")
    if not config:
        raise ValueError(f"{function}: config must name an nn.Linear, got none")
    modules = dict(model.named_modules())
    for name, cls in config.items():
        if cls not in (SemiSparseLinear, SemiSparseActivationLinear):
            raise TypeError(
                f"{function}: config[{name!r}] must be SemiSparseLinear or SemiSparseActivationLinear, got {cls!r}"
            )
        _check_layer(function, name, modules.get(name))
    for name, cls in config.items():
        modules[name].__class__ = cls
    guard(model)
    return model


def _check_layer(function: str, name: str, module: nn.Module | None) -> None:
    if type(module) is not nn.Linear:
        got = "no module" if module is None else type(module).__name__
        raise ValueError(f"{function}: {name!r} must name an nn.Linear, got {got}")
    if reason := reason_to_skip(module):
        raise ValueError(f"{function}: {name!r} cannot be pruned: {reason}")
    for size in ("in_features", "out_features"):
        if getattr(module, size) % 4:
            raise ValueError(f"{function}: {size} of {name!r} must be a multiple of 4, got {getattr(module, size)}")
    if module.weight.dtype not in FLOATS:
        raise TypeError(
            f"{function}: weight of {name!r} must be float32, bfloat16 or float16, got {module.weight.dtype}"
        )


@torch.no_grad()
def swap_semi_sparse_linear_with_linear(model: nn.Module) -> nn.Module:
    """Turn the layers of `swap_linear_with_semi_sparse_linear` back into nn.Linear, in place, and return ``model``.

    The weight of a `SemiSparseLinear` is pruned permanently, so the layer still computes the same. The input of a
    `SemiSparseActivationLinear` is no longer pruned.

    Raises:
        ValueError: the model has no such layer.
    """
    layers = [module for module in model.modules() if isinstance(module, SemiSparseLinear)]
    if not layers:
        raise ValueError(f"{_END}: the model must have layers of swap_linear_with_semi_sparse_linear, got none")
    for module in layers:
        if type(module) is SemiSparseLinear:
            module.weight.copy_(semi_sparse(module.weight))
        module.__class__ = nn.Linear
    return model
