# SPDX-License-Identifier: Apache-2.0
"""Block-sparse weights in a model: what is kept, numbers, training, files, compiling, going back, refusals."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import lowbit
from lowbit.ops.block_sparse_linear import blocks_of
from lowbit.quant.block_sparse import BlockSparseLinear


def pruned(n: int, k: int, size: int, share: float = 0.3) -> Tensor:
    weight = torch.randn(n, k)
    blocks_of(weight, size)[torch.rand(n // size, k // size) > share] = 0
    return weight


def model(size: int = 32, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers with blocks of zeros, and one that cannot be cut."""
    made = nn.Sequential(nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 64, bias=False), nn.Linear(64, 10))
    for at in (0, 2):
        made[at].weight.data = pruned(*made[at].weight.shape, size)
    return made.to(dtype)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_pruned_model_keeps_its_numbers_and_only_its_blocks(dtype: torch.dtype) -> None:
    sparse = model(dtype=dtype)
    dense, first = copy.deepcopy(sparse), sparse[0]
    report = lowbit.sparsify_(sparse, lowbit.block_sparse_weight(32))
    assert sparse[0] is first and type(sparse[0]) is type(sparse[2]) is BlockSparseLinear
    assert type(sparse[3]) is nn.Linear
    kept = int(blocks_of(dense[0].weight, 32).flatten(2).any(2).sum())
    assert sparse[0].weight.shape == (kept, 32, 32) and sparse[0].weight.dtype == dtype
    assert sparse[0].dequantize().equal(dense[0].weight)
    assert f"{kept} of 12 blocks of 32" in repr(sparse[0])
    rows = {row.layer: row for row in report.rows}
    assert rows["0"].error_db == torch.inf and rows["0"].bytes_after == sum(
        tensor.nbytes for tensor in (first.weight, first.crow_indices, first.col_indices)
    )
    assert "in blocks of 32, got 10 and 64" in rows["3"].note
    x = torch.randn(5, 128, dtype=dtype)
    assert (sparse(x) - dense(x)).abs().max() <= dense(x).abs().max() * torch.finfo(dtype).eps * 8
    assert lowbit.dequantize_(sparse) == ["0", "2"]
    assert type(sparse[0]) is nn.Linear and sparse[0].weight.equal(dense[0].weight) and not list(sparse.buffers())


@pytest.mark.parametrize("sparsity, left", [(0.0, 8), (0.25, 6), (0.5, 4), (0.99, 0), (None, 8)])
def test_sparsity_leaves_the_blocks_of_least_squares_out(sparsity: float | None, left: int) -> None:
    layer = nn.Linear(64, 32)
    blocks = blocks_of(layer.weight.data, 16)
    blocks.copy_(torch.randn(2, 4, 16, 16).sign() * torch.tensor([[8.0, 1, 7, 2], [3, 6, 4, 5]])[:, :, None, None])
    weight = layer.weight.detach().clone()
    report = lowbit.sparsify_(layer, lowbit.block_sparse_weight(16, sparsity=sparsity))
    assert len(layer.weight) == left
    kept = layer.dequantize()
    assert kept.equal(torch.where(weight.abs() > 8 - left, weight, 0))
    lost = (weight - kept).square().sum()
    wanted = 10 * torch.log10(weight.square().sum() / lost)
    assert report.rows[0].error_db == (torch.inf if left == 8 else pytest.approx(float(wanted)))


def test_blocks_can_be_trained_and_the_others_stay_zero() -> None:
    sparse = model()
    dense = copy.deepcopy(sparse)
    lowbit.sparsify_(sparse, lowbit.block_sparse_weight(32))
    masks = {at: dense[at].weight != 0 for at in (0, 2)}
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (sparse, dense)]
    for _ in range(3):
        x = torch.randn(7, 128)
        for module, optimizer in zip((sparse, dense), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            for at, mask in masks.items() if module is dense else ():
                dense[at].weight.grad *= mask
            optimizer.step()
    for at in masks:
        torch.testing.assert_close(sparse[at].dequantize(), dense[at].weight.detach())


def test_layers_that_share_a_weight_share_its_blocks() -> None:
    one, two = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
    two.weight = one.weight
    report = lowbit.sparsify_(nn.Sequential(one, two), lowbit.block_sparse_weight(16, sparsity=0.5))
    assert one.weight is two.weight and one.col_indices is two.col_indices
    assert report.rows[1].bytes_after == 0 and report.rows[1].note == "shares the weight of 0"


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_load_takes_the_blocks_into_a_float_model_also_without_memory(suffix: str, tmp_path: Path) -> None:
    sparse, file = model(), tmp_path / f"model.{suffix}"
    lowbit.sparsify_(sparse, lowbit.block_sparse_weight(32))
    if suffix == "pt":
        torch.save(sparse.state_dict(), file)
    else:
        from safetensors.torch import save_file

        save_file(sparse.state_dict(), file)
    x = torch.randn(4, 128)
    for device in ("cpu", "meta"):
        with torch.device(device):
            other = model()
        assert lowbit.load(other, file) == ["0", "2"]
        assert other(x).equal(sparse(x)) and other[0].weight.requires_grad
    other.load_state_dict(sparse.state_dict())
    assert copy.deepcopy(other)(x).equal(sparse(x))


@pytest.mark.parametrize("name, change, text", [
    ("0.col_indices", lambda it: it + 4, r"0.col_indices must be 0 to 3, got"),
    ("0.col_indices", lambda it: it - 9, r"0.col_indices must be 0 to 3, got"),
    ("0.crow_indices", lambda it: it.flip(0), r"0.crow_indices must rise from 0 to \d+"),
    ("0.crow_indices", lambda it: it.long(), r"0.crow_indices must be int32 \[4\], got int64 \[4\]"),
    ("0.weight", lambda it: it[:, :16], r"0.weight must be the blocks \[blocks, size, size\] of a weight \[96, 128\]"),
    ("0.weight", lambda it: it[:0], r"0.col_indices must be int32 \[0\]"),
])  # fmt: skip
def test_a_file_whose_blocks_do_not_fit_changes_nothing(name: str, change: Any, text: str) -> None:
    torch.manual_seed(3)
    sparse = model()
    lowbit.sparsify_(sparse, lowbit.block_sparse_weight(32))
    before = {key: value.clone() for key, value in sparse.state_dict().items()}
    state = {key: value + 1 if value.is_floating_point() else value for key, value in before.items()}
    state[name] = change(state[name])
    with pytest.raises(ValueError, match=f"load_state_dict: {text}"):
        sparse.load_state_dict(state)
    assert all(value.equal(before[key]) for key, value in sparse.state_dict().items())
    dense = model()
    with pytest.raises(ValueError, match=f"load: {text}"):
        lowbit.load(dense, state)
    assert type(dense[0]) is nn.Linear


def test_blocks_of_another_pattern_are_for_load_alone() -> None:
    sparse, other = (nn.Sequential(nn.Linear(64, 64)) for _ in range(2))
    lowbit.sparsify_(sparse, lowbit.block_sparse_weight(16, sparsity=0.5))
    lowbit.sparsify_(other, lowbit.block_sparse_weight(16, sparsity=0.25))
    with pytest.raises(ValueError, match=r"0.weight must have shape \[8, 16, 16\], got \[12, 16, 16\]; lowbit.load"):
        sparse.load_state_dict(other.state_dict())
    assert lowbit.load(sparse, other.state_dict()) == [] and len(sparse[0].weight) == 12


def test_it_compiles_to_one_graph_and_exports() -> None:
    sparse = model().eval().requires_grad_(False)
    lowbit.sparsify_(sparse, lowbit.block_sparse_weight(32))
    x = torch.randn(6, 128)
    torch._dynamo.reset()
    compiled = torch.compile(sparse, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 3):
        torch.testing.assert_close(compiled(x[:rows]), sparse(x[:rows]))
    trained = copy.deepcopy(sparse).train().requires_grad_()
    torch.compile(trained, fullgraph=True, backend="aot_eager")(x).sum().backward()
    grads = [parameter.grad.clone() for parameter in trained.parameters()]
    trained.zero_grad()
    trained(x).sum().backward()
    for mine, wanted in zip(grads, trained.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted.grad)
    program = torch.export.export(sparse, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert sum(node.target is torch.ops.lowbit.block_sparse_linear.default for node in program.graph.nodes) == 2
    torch.testing.assert_close(program.module()(x[:2]), sparse(x[:2]))


@pytest.mark.parametrize("arguments, text", [
    ({"blocksize": 8}, "blocksize must be a multiple of 16, got blocksize=8"),
    ({"blocksize": 40}, "blocksize must be a multiple of 16, got blocksize=40"),
    ({"blocksize": 64.0}, "blocksize must be a multiple of 16, got blocksize=64.0"),
    ({"sparsity": 1}, "sparsity must be None or from 0 up to below 1, got sparsity=1"),
    ({"sparsity": float("nan")}, "sparsity must be None or from 0 up to below 1, got sparsity=nan"),
    ({"sparsity": "half"}, "sparsity must be None or from 0 up to below 1, got sparsity='half'"),
])  # fmt: skip
def test_a_configuration_is_checked_when_it_is_made(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"block_sparse_weight: {re.escape(text)}"):
        lowbit.block_sparse_weight(**arguments)


def test_what_cannot_be_cut_is_named_and_nothing_changes() -> None:
    config = lowbit.block_sparse_weight(32)
    dense = model()
    with pytest.raises(ValueError, match="weight of 3 must have out_features and in_features in blocks of 32"):
        lowbit.sparsify_(dense, config, lambda module, name: isinstance(module, nn.Linear))
    dense[0].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="weight of 0 must be finite"):
        lowbit.sparsify_(dense, config)
    assert type(dense[0]) is type(dense[2]) is nn.Linear
    with torch.device("meta"):
        unset = nn.Linear(64, 64)
    with pytest.raises(ValueError, match="weight of the model itself must hold values, got one on the meta device"):
        lowbit.sparsify_(unset, config, lambda module, name: True)
    with pytest.raises(TypeError, match="got BlockSparseWeightConfig; lowbit.sparsify_ takes it"):
        lowbit.quantize_(model(), config)
    with pytest.raises(TypeError, match="must be a SemiSparseWeightConfig or a BlockSparseWeightConfig, got Int8"):
        lowbit.sparsify_(model(), lowbit.int8_weight_only())
    with pytest.raises(TypeError, match=r"lowbit.sparsify_\(model"):
        BlockSparseLinear(4, 4)
    sparse = model()
    lowbit.sparsify_(sparse, config)
    report = lowbit.quantize_(sparse, lowbit.int8_weight_only())
    assert [row.layer for row in report.quantized] == ["3"] and type(sparse[0]) is BlockSparseLinear


def test_a_weight_that_two_kinds_of_layers_share_lies_in_both_directions() -> None:
    """Conv1D of transformers multiplies by [k, n], nn.Linear by [n, k]."""
    conv1d = Conv1D(64, 64)
    linear = nn.Linear(64, 64, bias=False)
    linear.weight = conv1d.weight
    model, x = nn.ModuleList([conv1d, linear]), torch.randn(3, 64)
    wanted = [conv1d(x), linear(x)]
    lowbit.sparsify_(model, lowbit.block_sparse_weight(16))
    for layer, y in zip(model, wanted, strict=True):
        assert type(layer) is BlockSparseLinear
        torch.testing.assert_close(layer(x), y)
