# SPDX-License-Identifier: Apache-2.0
"""Training with 2:4 sparsity: the best transposable masks, exact products, weights that inference takes as they are."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.training import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
)
from lowbit.training.semi_sparse import semi_sparse, semi_sparse_mask

SWAP = "swap_linear_with_semi_sparse_linear"


def best_kept(tile: Tensor) -> float:
    """The most that squares of two of each row and column of a 4 x 4 tile add up to, in float64, by trying all."""
    pairs = list(itertools.combinations(range(4), 2))
    sizes = tile.double().square()
    return max(
        sum(float(sizes[row, column]) for row, two in enumerate(rows) for column in two)
        for rows in itertools.product(pairs, repeat=4)
        if all(sum(column in two for two in rows) == 2 for column in range(4))
    )


def is_semi_sparse(mask: Tensor) -> bool:
    """Whether at most two of each four neighbours along both dimensions are set."""
    return all(int(part.unflatten(1, (-1, 4)).sum(2).max()) <= 2 for part in (mask, mask.T))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**14])
def test_a_mask_keeps_most_of_each_tile_and_is_semi_sparse_both_ways(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    matrix = (torch.randn(12, 16) * scale).to(dtype)
    mask = semi_sparse_mask(matrix)
    assert mask.shape == matrix.shape and is_semi_sparse(mask)
    for row, column in itertools.product(range(0, 12, 4), range(0, 16, 4)):
        tile, kept = (part[row : row + 4, column : column + 4] for part in (matrix, mask))
        assert int(kept.sum()) == 8
        total, most = float(tile.double().square()[kept].sum()), best_kept(tile)
        assert total >= most * (1 - 32 * 2.0**-24)


def test_masks_of_extreme_and_equal_numbers_are_semi_sparse() -> None:
    most = torch.finfo(torch.float32).max
    for matrix in (torch.full((8, 8), most), torch.full((8, 8), 2.0**-149), torch.zeros(8, 8), -torch.ones(8, 8)):
        mask = semi_sparse_mask(matrix)
        assert is_semi_sparse(mask) and int(mask.sum()) == 32
    mixed = torch.full((4, 4), 2.0**-126)
    mixed[0, 3] = mixed[2, 1] = most
    assert semi_sparse_mask(mixed)[[0, 2], [3, 1]].all()


def test_many_tiles_are_those_of_each_part() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(260, 1024)  # more tiles than are chosen at once
    assert torch.equal(semi_sparse_mask(matrix)[256:], semi_sparse_mask(matrix[256:]))


def test_a_matrix_that_ends_inside_of_a_tile_is_that_with_zeros_behind_it() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(6, 8)
    assert torch.equal(semi_sparse_mask(matrix), semi_sparse_mask(nn.functional.pad(matrix, (0, 0, 0, 2)))[:6])


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 8, bias=False), nn.Tanh(), nn.Linear(8, 4))


ALL = {"0": SemiSparseLinear, "2": SemiSparseLinear}


def test_forward_and_gradients_are_those_of_masked_products_in_float64(model: nn.Module) -> None:
    layer = model[0]
    swap_linear_with_semi_sparse_linear(model, ALL)
    assert model[0] is layer and type(layer) is SemiSparseLinear and type(model[4]) is nn.Linear
    x = torch.randn(5, 32, requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    weight, rows, grads = layer.weight.detach().double(), x.detach().double(), grad.double()
    pruned = torch.where(semi_sparse_mask(layer.weight), weight, 0)
    u = 2.0**-24
    for got, left, right in (
        (y - layer.bias, rows, pruned.T),
        (x.grad, grads, pruned),
        (layer.weight.grad, grads.T, rows),  # also of weights that are 0 now
    ):
        allowed = (left.shape[1] + 8) * u * (left.abs() @ right.abs() + 1)
        assert ((got.detach().double() - left @ right).abs() <= allowed).all()
    assert (layer.bias.grad - grad.sum(0)).abs().max() < 1e-5


def test_pruned_activations_are_semi_sparse_in_tiles_of_rows_and_features(model: nn.Module) -> None:
    swap_linear_with_semi_sparse_linear(model, {"0": SemiSparseActivationLinear})
    x = torch.randn(3, 2, 32, requires_grad=True)
    y = model[0](x)
    rows = x.detach().reshape(6, 32)
    pruned = torch.where(semi_sparse_mask(rows), rows, 0)
    assert torch.equal(y, nn.functional.linear(pruned, model[0].weight, model[0].bias).view(3, 2, 24))
    y.sum().backward()
    assert torch.allclose(x.grad, model[0].weight.sum(0).expand_as(x), atol=1e-6)
    assert model[0](x[0, 0]).shape == (24,)
    swap_semi_sparse_linear_with_linear(model)
    assert torch.equal(model[0](x), nn.functional.linear(x, model[0].weight, model[0].bias))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_pruned(model: nn.Module, value: float) -> None:
    swap_linear_with_semi_sparse_linear(model, ALL)
    for column in range(4):  # wherever the mask is
        with torch.no_grad():
            model[0].weight.normal_()[1, column] = value
        assert not model[0](torch.ones(1, 32))[0, 1].isfinite()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_way_back_leaves_the_weights_of_the_last_step(model: nn.Module, value: float) -> None:
    swap_linear_with_semi_sparse_linear(model, {"0": SemiSparseLinear})
    with torch.no_grad():
        model[0].weight[:4, :4] = value
    used = semi_sparse(model[0].weight.detach())
    swap_semi_sparse_linear_with_linear(model)
    torch.testing.assert_close(model[0].weight.detach(), used, rtol=0, atol=0, equal_nan=True)


def test_training_learns_and_inference_takes_the_pruned_weights_as_they_are(
    model: nn.Module, one_step: Callable[[nn.Module, torch.optim.Optimizer, int], Tensor]
) -> None:
    swap_linear_with_semi_sparse_linear(model, ALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    masks = [semi_sparse_mask(model[0].weight)]
    losses = [one_step(model, optimizer, step) for step in range(60)]
    masks.append(semi_sparse_mask(model[0].weight))
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert not torch.equal(*masks)  # weights come back
    x = torch.randn(4, 32)
    with torch.no_grad():
        wanted = model(x)
        with pytest.raises(
            ValueError, match=r"0 is being trained as 2:4 weights; .*swap_semi_sparse_linear_with_linear"
        ):
            lowbit.quantize_(model, lowbit.int8_weight_only())
        assert swap_semi_sparse_linear_with_linear(model) is model
        assert torch.equal(model(x), wanted) and all(type(model[i]) is nn.Linear for i in (0, 2, 4))
        assert is_semi_sparse(model[0].weight != 0)
        report = lowbit.quantize_(model, lowbit.semi_sparse_weight(pruned=True), lambda module, name: name in ALL)
        assert all(row.error_db > 35 for row in report.rows if row.layer in ALL)  # of rounding alone
        assert (model(x) - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_interrupted_training_goes_on_bit_for_bit(
    model: nn.Module, one_step: Callable[[nn.Module, torch.optim.Optimizer, int], Tensor]
) -> None:
    swap_linear_with_semi_sparse_linear(model, ALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        one_step(model, optimizer, step)
    other = copy.deepcopy(model)
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        assert one_step(model, optimizer, step) == one_step(other, resumed, step)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_autocast_multiplies_in_its_dtype(model: nn.Module) -> None:
    swap_linear_with_semi_sparse_linear(model, ALL)
    with torch.autocast("cpu", torch.bfloat16):
        assert model[0](torch.randn(4, 32)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "config, error, text",
    [
        ({}, ValueError, "config must name an nn.Linear, got none"),
        (["0"], TypeError, "config must be a dict of names and classes, got list"),
        ({"0": nn.Linear}, TypeError, r"config\['0'\] must be SemiSparseLinear or SemiSparseActivationLinear"),
        ({"0": SemiSparseLinear, "1": SemiSparseLinear}, ValueError, "'1' must name an nn.Linear, got GELU"),
        ({"0": SemiSparseLinear, "head": SemiSparseLinear}, ValueError, "'head' must name an nn.Linear, got no module"),
        (
            {"0": SemiSparseLinear, "5": SemiSparseLinear},
            ValueError,
            "out_features of '5' must be a multiple of 4, got 3",
        ),
        (
            {"0": SemiSparseLinear, "6": SemiSparseLinear},
            ValueError,
            "in_features of '6' must be a multiple of 4, got 3",
        ),
        (
            {"0": SemiSparseLinear, "7": SemiSparseLinear},
            TypeError,
            "weight of '7' must be float32, .*got torch.float64",
        ),
    ],
)
def test_what_cannot_be_pruned_is_named_and_nothing_changes(
    model: nn.Module, config: object, error: type[Exception], text: str
) -> None:
    model.extend([nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 4).double()])
    with pytest.raises(error, match=f"{SWAP}: {text}"):
        swap_linear_with_semi_sparse_linear(model, config)
    assert type(model[0]) is nn.Linear


def test_layers_that_are_not_there_are_named(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"swap_semi_sparse_linear_with_linear: the model must have layers of {SWAP}"):
        swap_semi_sparse_linear_with_linear(model)
    with pytest.raises(TypeError, match=rf"SemiSparseLinear: {SWAP}\(model, .*makes one of an nn.Linear"):
        SemiSparseLinear(4, 4)
    swap_linear_with_semi_sparse_linear(model, ALL)
    with pytest.raises(ValueError, match="'0' must name an nn.Linear, got SemiSparseLinear"):
        swap_linear_with_semi_sparse_linear(model, ALL)


@pytest.fixture
def one_step() -> Callable[[nn.Module, torch.optim.Optimizer, int], Tensor]:
    """A step on the batch of this number; returns the loss."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step % 8))
        loss = (model(x) - x[:, :4].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run
