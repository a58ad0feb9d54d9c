# SPDX-License-Identifier: Apache-2.0
"""An input of another feature size is refused as nn.Linear refuses it, also where the padded panels would hold it."""

from __future__ import annotations

import pytest
import torch
from gated_mlp import GatedMLP
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowbit
from lowbit.formats import FORMATS

K = 128 + 4  # padded to 192
WRONG = (1, 129, 131, 160, 191, 192, 193, 256)


def layer(config: object, k: int = K) -> nn.Module:
    model = nn.Sequential(nn.Linear(k, 33))
    lowbit.quantize_(model, config)
    return model


@pytest.mark.parametrize("shape", [(3,), (1,), (), (2, 40), (2, 2)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_every_format_refuses_every_other_size(config, shape, grad, subtests):
    model = layer(config)
    for k in WRONG:
        with subtests.test(k=k):
            x = torch.randn(*shape, k, requires_grad=grad)
            with (
                torch.set_grad_enabled(grad),
                pytest.raises(RuntimeError, match=rf"must be k=132 \(in_features\), got x of shape \[.*{k}\]"),
            ):
                model(x)
    assert model(torch.randn(*shape, K)).shape == (*shape, 33)


def test_nn_linear_raises_the_same_kind():
    with pytest.raises(RuntimeError):
        nn.Linear(K, 33)(torch.randn(2, K + 1))


@pytest.mark.parametrize("cls", FORMATS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_layers_refuse_too(dynamic, cls):
    model = layer(cls())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert compiled(torch.randn(2, K)).shape == (2, 33)
    with pytest.raises(RuntimeError, match="must be k=132"):
        compiled(torch.randn(2, 192))
    torch.compiler.reset()


def test_fake_tensors_are_refused_too(config):
    model = layer(config)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="must be k=132"):
        model(torch.randn(2, 192))


def test_the_meta_device_refuses_too(config):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(K, 33))
    lowbit.quantize_(model, config)
    with pytest.raises(RuntimeError, match="must be k=132"):
        model(torch.randn(2, 192, device="meta"))


def test_a_fused_gated_mlp_refuses_too(config):
    model = nn.ModuleDict({"mlp": GatedMLP(K, 40)}).eval()
    lowbit.quantize_(model, config)
    assert lowbit.fuse_gated_mlps(model) == ["mlp"]
    for grad in (False, True):
        with pytest.raises(RuntimeError, match="must be k=132"):
            model["mlp"](torch.randn(2, 190, requires_grad=grad))


def test_an_encoder_layer_refuses_too():
    encoder = nn.TransformerEncoderLayer(36, 4, 100, batch_first=True).eval()
    lowbit.quantize_(encoder, lowbit.int8_weight_only())
    with pytest.raises((RuntimeError, AssertionError)):
        encoder.linear1(torch.randn(2, 5, 64))
