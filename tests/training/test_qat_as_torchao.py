# SPDX-License-Identifier: Apache-2.0
"""torchao's QAT beside ours, where both mean the same: weights and gradients, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.training import QATConfig

ao = pytest.importorskip("torchao.quantization")
from torchao.quantization.qat import QATConfig as PeerConfig  # noqa: E402
from torchao.quantization.qat.fake_quantize_config import _infer_fake_quantize_configs  # noqa: E402


def weight_of_exact_scales(bits: int, group_size: int) -> Tensor:
    """Groups whose largest weight makes the scale a power of two, which float16 holds; of either sign."""
    groups = torch.randn(24, 96 // group_size, group_size).clamp(-3, 3)
    largest = (2 ** (bits - 1) - 0.5) * 2.0 ** torch.randint(-6, 3, groups.shape[:2])
    groups *= largest.unsqueeze(2) / 4
    groups[:, :, 5] = largest * torch.where(torch.rand(largest.shape) < 0.5, -1, 1)
    return groups.flatten(1)


@pytest.mark.parametrize("bits, group_size", [(4, 32), (2, 32), (3, 96), (8, 32)])
def test_integer_weights_and_their_gradients_are_torchaos(bits: int, group_size: int) -> None:
    dtype = getattr(torch, f"int{bits}")
    ours = nn.Sequential(nn.Linear(96, 24, bias=False))
    with torch.no_grad():
        ours[0].weight.copy_(weight_of_exact_scales(bits, group_size))
    peer, x = copy.deepcopy(ours), torch.randn(5, 96)
    size = group_size if group_size != 96 else None
    lowbit.quantize_(ours, QATConfig(lowbit.intx_weight_only(dtype, size, scale="absmax")))
    granularity = ao.granularity.PerGroup(size) if size else ao.granularity.PerAxis(0)
    ao.quantize_(peer, PeerConfig(ao.IntxWeightOnlyConfig(dtype, granularity), step="prepare"))
    assert torch.equal(ours[0].fake_quantized_weight(), peer[0].weight_fake_quantizer(peer[0].weight))
    for model in (ours, peer):
        model(x).square().sum().backward()
    found, wanted = ours[0].weight.grad, peer[0].weight.grad
    if torch.__version__ >= "2.15":  # torch.clamp has no gradient at its ends any more; ours is that of torch before
        found = found * (wanted != 0)
    assert torch.equal(found, wanted) and (found == 0).sum() >= 24 * 96 // group_size // 4


def test_torchao_refuses_int8_and_we_train_it(subtests: pytest.Subtests) -> None:
    for peer in (ao.Int8WeightOnlyConfig(), ao.Int8DynamicActivationInt8WeightConfig()):
        with subtests.test(type(peer).__name__):
            with pytest.raises(ValueError):
                _infer_fake_quantize_configs(peer)
            model = nn.Sequential(nn.Linear(96, 24))
            lowbit.quantize_(model, QATConfig(peer))
            model(torch.randn(3, 96)).sum().backward()
            assert model[0].weight.grad.any() and model[0].spec.format == "int8"
