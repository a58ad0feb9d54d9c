# SPDX-License-Identifier: Apache-2.0
"""nn.TransformerEncoder, which reads the weights of its linear layers itself, works when they are quantized."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import lowbit
from lowbit.quant import QuantLinear, quantize_


@pytest.fixture
def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 96, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2).eval()


def padding() -> torch.Tensor:
    return torch.arange(7)[None] >= torch.tensor([[7], [5], [3]])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("whole", [True, False], ids=["encoder", "layer"])
def test_inference_of_a_quantized_encoder_stays_close(config, encoder, masked, whole):
    x, mask = torch.randn(3, 7, 32), padding() if masked else None
    module = encoder if whole else encoder.layers[0]
    keep = ~mask if masked else torch.ones(3, 7, dtype=torch.bool)
    with torch.inference_mode():
        wanted = module(x, src_key_padding_mask=mask)
        report = quantize_(module, config)
        for tested in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            y = tested(x, src_key_padding_mask=mask)
            assert (y - wanted)[keep].norm() < 0.2 * wanted[keep].norm()
    assert f"turned off in {2 if whole else 1} nn.TransformerEncoderLayer" in repr(report)
    assert {row.layer.rsplit(".")[-1] for row in report.quantized} == {"linear1", "linear2"}
    assert {row.layer.rsplit(".")[-1] for row in report.skipped} == {"out_proj"}


def test_an_encoder_layer_without_quantized_children_keeps_its_fast_path(encoder):
    report = quantize_(encoder, lowbit.int8_weight_only(), lambda module, name: name.startswith("layers.1.linear"))
    assert encoder.layers[0].activation_relu_or_gelu == 1 and encoder.layers[1].activation_relu_or_gelu == 0
    assert isinstance(encoder.layers[1].linear1, QuantLinear) and "turned off in 1" in repr(report)
    with torch.inference_mode():
        assert encoder(torch.randn(3, 7, 32), src_key_padding_mask=padding()).isfinite().all()


def test_decoder_layers_work_as_they_are(config):
    decoder = nn.TransformerDecoderLayer(32, 4, 96, batch_first=True, dropout=0.0).eval()
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 6, 32)
    with torch.inference_mode():
        wanted = decoder(x, memory)
        report = quantize_(decoder, config)
        assert (decoder(x, memory) - wanted).norm() < 0.2 * wanted.norm()
    assert not report.notes
