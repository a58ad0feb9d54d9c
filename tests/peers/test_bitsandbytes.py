# SPDX-License-Identifier: Apache-2.0
"""Weights of bitsandbytes become QuantLinear's code by code, and go back: what bitsandbytes writes, and what it reads."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit
from lowbit.peers.bitsandbytes import from_bitsandbytes, replace_linear4bit, to_bitsandbytes
from lowbit.reference.quantize import LEVELS

bnb = pytest.importorskip("bitsandbytes")


def linear4bit(n: int, k: int, quant_type: str, blocksize: int = 64, nested: bool = False, bias: bool = True) -> nn.Module:
    layer = bnb.nn.Linear4bit(k, n, bias=bias, compute_dtype=torch.float32, quant_type=quant_type, compress_statistics=nested)
    layer.weight.blocksize = blocksize
    layer.load_state_dict({"weight": torch.randn(n, k) * 0.05} | ({"bias": torch.randn(n)} if bias else {}))
    return layer.to("cpu").eval()


def decoded(layer: nn.Module) -> torch.Tensor:
    """By the definition: bitsandbytes 0.50's own kernel for AVX-512 is wrong where blocks run over the ends of rows."""
    state, packed = layer.weight.quant_state, layer.weight.data.flatten()
    absmax = state.absmax
    if state.nested:
        absmax = bnb.functional.dequantize_blockwise(absmax, state.state2) + state.offset
    codes = torch.stack((packed >> 4, packed & 15), 1).flatten()
    spread = absmax.repeat_interleave(state.blocksize)[: codes.numel()]
    return (state.code[codes.int()] * spread).view(state.shape)


CASES = [(16, 64, 64), (33, 256, 64), (24, 96, 64), (48, 320, 128), (20, 1024, 512), (20, 64, 256), (7, 128, 128), (512, 16, 4096)]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("n, k, blocksize", CASES)
def test_codes_are_kept_and_scales_to_11_bits(n: int, k: int, blocksize: int, quant_type: str, nested: bool) -> None:
    theirs = linear4bit(n, k, quant_type, blocksize, nested)
    state = theirs.state_dict()
    dense = decoded(theirs)
    model = nn.Linear(k, n)
    lowbit.load(model, from_bitsandbytes(state))
    assert isinstance(model, lowbit.QuantLinear) and model.spec.format == quant_type
    codes = model.unpack()[0].flatten()
    packed = state["weight"].view(torch.uint8).flatten()
    assert torch.equal(codes, torch.stack((packed >> 4, packed & 15), 1).flatten()[: n * k])
    torch.testing.assert_close(model.dequantize(), dense, rtol=2.0**-11, atol=0)
    x = torch.randn(3, k)
    torch.testing.assert_close(model(x), nn.functional.linear(x, dense, theirs.bias), rtol=1e-3, atol=2e-3)
    assert torch.equal(model.bias, theirs.bias)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("config", [lowbit.nf4_weight_only(64), lowbit.fp4_weight_only(128), lowbit.nf4_weight_only(None)], ids=str)
def test_what_is_written_is_read_by_bitsandbytes(config: lowbit.formats.FormatConfig, nested: bool) -> None:
    model = nn.Linear(256, 48)
    lowbit.quantize_(model, config)
    state = to_bitsandbytes(model.state_dict(), compress_statistics=nested, dtype=torch.float32)
    stats = {key.removeprefix("weight."): value for key, value in state.items() if key.startswith("weight.")}
    weight = bnb.nn.Params4bit.from_prequantized(state["weight"], stats, device="cpu")
    dense = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    torch.testing.assert_close(dense, model.dequantize(), rtol=2e-6, atol=0) if not nested else None
    assert (dense - model.dequantize()).abs().max() <= 0.02 * model.dequantize().abs().max()
    again = nn.Linear(256, 48)
    lowbit.load(again, from_bitsandbytes(state))
    assert torch.equal(again.unpack()[0], model.unpack()[0])
    if not nested and config.group_size:
        assert torch.equal(again.dequantize(), model.dequantize())


def test_a_checkpoint_of_bitsandbytes_comes_back_as_it_was() -> None:
    theirs = nn.Sequential(linear4bit(32, 64, "nf4"), nn.LayerNorm(32), linear4bit(16, 32, "fp4", 32, bias=False))
    state = theirs.state_dict()
    ours = from_bitsandbytes(state)
    assert sorted(ours) == ["0.bias", "0.layout", "0.weight", "1.bias", "1.weight", "2.layout", "2.weight"]
    assert ours["1.weight"] is state["1.weight"]
    back = to_bitsandbytes(ours, dtype=torch.float32)
    assert back.keys() == state.keys()
    for key, value in state.items():
        if key.endswith("absmax"):
            torch.testing.assert_close(back[key], value, rtol=2.0**-11, atol=0)
        elif "quant_state" in key:
            assert json.loads(bytes(back[key].tolist())) == json.loads(bytes(value.tolist()))
        else:
            assert torch.equal(back[key], value), key


def test_the_nested_map_is_that_of_bitsandbytes() -> None:
    state = linear4bit(32, 64, "nf4", nested=True).state_dict()
    back = to_bitsandbytes(from_bitsandbytes(state), compress_statistics=True)
    torch.testing.assert_close(back["weight.nested_quant_map"], state["weight.nested_quant_map"], rtol=0, atol=1e-7)
    assert torch.equal(back["weight.quant_map"], LEVELS["nf4"])
    assert (back["weight.absmax"].int() - state["weight.absmax"].int()).abs().max() <= 1  # the scales were rounded between


def test_other_storage_of_the_codes() -> None:
    state = linear4bit(32, 64, "nf4").state_dict()
    stored = dict(state, weight=state["weight"].flatten().view(torch.bfloat16)[:, None])
    assert torch.equal(from_bitsandbytes(stored)["weight"], from_bitsandbytes(state)["weight"])


def test_a_layer_of_llm_int8() -> None:
    theirs = bnb.nn.Linear8bitLt(70, 20, bias=False, has_fp16_weights=False)
    weight = torch.randn(20, 70)
    theirs.load_state_dict({"weight": weight})
    state = theirs.to("cpu").state_dict()
    model = nn.Linear(70, 20, bias=False)
    lowbit.load(model, from_bitsandbytes(state))
    assert model.spec.format == "int8"
    wanted = state["weight"].float() * state["SCB"][:, None] / 127
    torch.testing.assert_close(model.dequantize(), wanted, rtol=1e-6, atol=0)


def test_layers_of_a_model_are_replaced_where_they_are() -> None:
    shared = linear4bit(64, 64, "nf4")
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": shared, "c": nn.Linear(64, 64)}).eval()
    dense = decoded(shared)
    assert replace_linear4bit(model) == ["a.0", "b"]
    assert isinstance(model["b"], lowbit.QuantLinear) and model["b"] is model["a"][0] and type(model["c"]) is nn.Linear
    assert not model["b"].training
    torch.testing.assert_close(model["b"].dequantize(), dense, rtol=2.0**-11, atol=0)
    assert copy.deepcopy(model)["b"](torch.randn(2, 64)).shape == (2, 64)


def test_a_layer_that_was_used_is_read_too() -> None:
    """With AVX512-BF16 bitsandbytes packs the weight anew at the first call."""
    theirs = linear4bit(64, 128, "nf4")
    dense = decoded(theirs)
    theirs(torch.randn(1, 128))
    model = nn.Sequential(theirs)
    replace_linear4bit(model)
    torch.testing.assert_close(model[0].dequantize(), dense, rtol=1e-2, atol=0)  # which may round the scales to bfloat16


def test_what_cannot_be_read_or_written_is_refused_by_name(tmp_path: Path) -> None:
    state = {f"up.{key}": value for key, value in linear4bit(32, 40, "nf4").state_dict().items()}
    with pytest.raises(ValueError, match="from_bitsandbytes: up.weight: 32 weights of a row or more must share a scale, got k=40 in blocks of 64"):
        from_bitsandbytes(state)
    state = linear4bit(32, 64, "nf4").state_dict()
    with pytest.raises(ValueError, match="weight.absmax must be beside weight.quant_state.bitsandbytes__nf4, and is missing"):
        from_bitsandbytes({key: value for key, value in state.items() if key != "weight.absmax"})
    with pytest.raises(ValueError, match="must be 1024 bytes and 32 scales, got 1024 and 31"):
        from_bitsandbytes(dict(state) | {"weight.absmax": state["weight.absmax"][1:]})
    layer = nn.Linear(100, 8)
    lowbit.quantize_(layer, lowbit.nf4_weight_only(64))
    with pytest.raises(ValueError, match="to_bitsandbytes: weight: k must be a multiple of 64, got k=100"):
        to_bitsandbytes(layer.state_dict())
    layer = nn.Linear(64, 8)
    lowbit.quantize_(layer, lowbit.int4_weight_only(32))
    with pytest.raises(ValueError, match="to_bitsandbytes: weight must be nf4 or fp4, got int4 g32"):
        to_bitsandbytes(layer.state_dict())
    with pytest.raises(ValueError, match="must be quantized layers of a model, got the model itself"):
        replace_linear4bit(linear4bit(32, 64, "nf4"))
    with pytest.raises(ValueError, match="got 0 without codes"):
        replace_linear4bit(nn.Sequential(bnb.nn.Linear4bit(64, 32)))
