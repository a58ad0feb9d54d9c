# SPDX-License-Identifier: Apache-2.0
"""Weights of torchao's tensor classes become QuantLinear's code by code."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit
from lowbit.peers.torchao import from_torchao

ao = pytest.importorskip("torchao.quantization")


def test_an_nf4_tensor_keeps_its_codes() -> None:
    module = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    weight = torch.randn(128, 256)
    theirs = module.to_nf4(weight, 64, 256)
    model = nn.Linear(256, 128)
    state = from_torchao({"weight": theirs, "bias": model.bias.detach()})
    lowbit.load(model, state)
    assert model.spec.format == "nf4" and model.spec.group_size == 64
    packed = theirs.quantized_data.flatten()
    assert torch.equal(model.unpack()[0].flatten(), torch.stack((packed >> 4, packed & 15), 1).flatten())
    torch.testing.assert_close(model.dequantize(), theirs.get_original_weight(), rtol=2e-3, atol=0)  # 4 decimals there


def test_a_float8_tensor_is_read_exactly() -> None:
    theirs = nn.Sequential(nn.Linear(96, 40))
    ao.quantize_(theirs, ao.Float8WeightOnlyConfig())
    model = nn.Sequential(nn.Linear(96, 40))
    lowbit.load(model, from_torchao(theirs.state_dict()))
    assert model[0].spec.format == "fp8_e4m3"
    torch.testing.assert_close(model[0].dequantize(), theirs[0].weight.dequantize().float(), rtol=2e-7, atol=0)


def test_float8_activations_are_taken_per_row() -> None:
    theirs = nn.Sequential(nn.Linear(96, 40))
    ao.quantize_(theirs, ao.Float8WeightOnlyConfig())
    weight = theirs[0].weight
    workflows = importlib.import_module("torchao.quantization.quantize_.workflows")
    weight.act_quant_kwargs = workflows.QuantizeTensorToFloat8Kwargs(granularity=ao.PerRow())
    model = nn.Linear(96, 40)
    lowbit.load(model, from_torchao({"weight": weight, "bias": model.bias.detach()}))
    assert model.spec.name == "fp8_e4m3 per-channel float8-activations per row"
    weight.act_quant_kwargs = workflows.QuantizeTensorToFloat8Kwargs(granularity=ao.PerTensor())
    with pytest.raises(ValueError, match="granularity of the activations of weight must be PerRow.*PerTensor.*whole tensor"):
        from_torchao({"weight": weight})


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128, 512])
def test_an_int4_tensor_keeps_its_codes(symmetric: bool, group_size: int, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """As mslk's int4_row_quantize and int4_row_quantize_zp make them, which run on a GPU: q = (w - low) / scale - 8, w = scale q + zero_point."""
    torch.manual_seed(0)
    w = torch.randn(40, 512) + 0.3
    groups = w.view(40, -1, group_size)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = groups.abs().amax(-1, keepdim=True) / 8 if symmetric else (high - low) / 15
    added = torch.zeros_like(scale) if symmetric else low + 8 * scale
    scale, added = scale.bfloat16().float(), added.bfloat16().float()
    q = ((groups - added) / scale).round().clamp(-8, 7)
    wanted, q = (q * scale + added).view(40, 512), q.view(40, 512).to(torch.int8)
    parts = ((q[:, ::2] & 15) | (q[:, 1::2] << 4)), scale[..., 0].t().bfloat16(), added[..., 0].t().bfloat16()
    theirs = ao.Int4Tensor(*(part.contiguous() for part in parts), [1, group_size], w.shape)
    for given in ({"0.weight": theirs}, write({"0.weight": theirs}, tmp_path)):
        with subtests.test(kind=type(given).__name__):
            layers = nn.Sequential(nn.Linear(512, 40, bias=False))
            lowbit.load(layers, from_torchao(given))
            model = layers[0]
            assert model.spec.format == "int4" and model.spec.asymmetric != symmetric and model.spec.group_size == group_size % 512
            assert torch.equal(model.unpack()[0].to(torch.int8) - 8, q)
            steps = scale.expand_as(groups).reshape(40, 512)
            assert ((model.dequantize() - wanted).abs() <= steps * (2**-7 + 16 * 2**-11)).all()
            if symmetric:
                torch.testing.assert_close(model.dequantize(), wanted, rtol=2**-11, atol=0)


def int_weights() -> Iterator[tuple[str, torch.Tensor, str]]:
    """Weights [40, 512] of integer classes, and the specs that they become."""
    torch.manual_seed(0)
    w = torch.randn(40, 512)
    symmetric, asymmetric = ao.MappingType.SYMMETRIC, ao.MappingType.ASYMMETRIC
    for granularity, name in ((ao.PerRow(), "per-channel"), (ao.PerGroup(64), "g64"), (ao.PerTensor(), "per-channel")):
        yield f"{granularity}", ao.Int8Tensor.from_hp(w, granularity), f"int8 {name}"
        yield f"{granularity} asymmetric", ao.Int8Tensor.from_hp(w + 1, granularity, asymmetric), f"int8 {name} asymmetric"
    for bits in range(2, 9):
        for block, mapping, name in (
            ([1, 512], symmetric, "per-channel"), ([1, 32], asymmetric, "g32 asymmetric"), ([2, 128], symmetric, "g128"), ([1, 192], symmetric, "g64"),
        ):  # fmt: skip
            part = w[:, : 512 // block[1] * block[1]]
            weight = ao.IntxUnpackedToInt8Tensor.from_hp(part, block, getattr(torch, f"int{bits}"), mapping_type=mapping)
            yield f"int{bits} {block} {name}", weight, f"int{bits} {name}"


@pytest.mark.parametrize(("weight", "name"), [pytest.param(*rest, id=id) for id, *rest in int_weights()])
def test_integers_keep_their_codes_in_a_state_dict_and_in_a_file(weight, name, tmp_path, subtests: pytest.Subtests) -> None:
    n, k = weight.shape
    file = write({"layer.weight": weight, "layer.bias": torch.ones(n)}, tmp_path)
    for given in ({"layer.weight": weight, "layer.bias": torch.ones(n)}, file):
        with subtests.test(kind=type(given).__name__):
            model = nn.Sequential()
            model.layer = nn.Linear(k, n)
            lowbit.load(model, from_torchao(given))
            assert model.layer.spec.name == name and torch.equal(model.layer.bias, torch.ones(n))
            codes = model.layer.unpack()[0]
            assert torch.equal(codes.int() - codes.new_tensor(128 >> (8 - int(name[3]))).int(), weight.qdata.int())
            rtol = 2e-7 if "per-channel" in name else 2.0**-11
            wanted = weight.dequantize()
            torch.testing.assert_close(model.layer.dequantize(), wanted, rtol=rtol, atol=rtol * wanted.abs().max().item())


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("Int8WeightOnlyConfig()", "int8 per-channel"),
        ("Int8WeightOnlyConfig(granularity=PerGroup(32))", "int8 g32"),
        ("Int8DynamicActivationInt8WeightConfig()", "int8 per-channel int8-activations per row"),
        ("Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC)", "int8 per-channel int8-activations per row asymmetric"),
        ("IntxWeightOnlyConfig(torch.int3, PerGroup(64))", "int3 g64"),
        ("IntxWeightOnlyConfig(torch.int6, PerAxis(0), MappingType.ASYMMETRIC)", "int6 per-channel asymmetric"),
        ("Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))", "int4 g32 int8-activations per row asymmetric"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_torchao_quantized_computes_the_same_from_its_file(config, name, dtype, tmp_path) -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 64)).to(dtype)
    model = copy.deepcopy(theirs)
    ao.quantize_(theirs, eval(config, vars(ao) | {"torch": torch}))
    assert lowbit.load(model, from_torchao(write(theirs.state_dict(), tmp_path))) == ["0", "2"]
    assert model[0].spec.name == name
    x = torch.randn(5, 128, dtype=dtype)
    wanted = theirs(x).float()
    error = (model(x).float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert error < (0.02 if "activations" in name else 0.01 if dtype is torch.bfloat16 else 1e-3)


def test_a_folder_of_transformers_is_read_though_a_weight_has_its_parts_in_two_shards(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    from tiny_models import save

    save("llama", tmp_path)
    config = transformers.TorchAoConfig(ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "torchao", max_shard_size="40KB")
    assert len(list((tmp_path / "torchao").glob("*.safetensors"))) > 2
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.float32)
    turned = lowbit.load(model, from_torchao(tmp_path / "torchao"))
    assert "model.layers.0.mlp.down_proj" in turned and model.model.layers[0].mlp.down_proj.spec.name == "int4 g32"
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, theirs(tokens).logits, rtol=1e-2, atol=1e-2)


def test_a_file_is_read_without_torchao(python: Callable[..., str], tmp_path) -> None:
    file = write({"layer.weight": ao.Int8Tensor.from_hp(torch.randn(8, 64), ao.PerRow())}, tmp_path)
    code = f"""
import sys
sys.modules["torchao"] = None
from lowbit.peers.torchao import from_torchao
print(sorted(from_torchao({str(file)!r})))"""
    assert python(code).split("\n")[-2] == "['layer.layout', 'layer.weight']"


def test_what_does_not_fit_is_refused_by_name(tmp_path) -> None:
    w = torch.randn(40, 96)

    def refused(weight: torch.Tensor, match: str, name: str = "layer.weight") -> None:
        for given in ({name: weight}, write({name: weight}, tmp_path)):
            with pytest.raises((ValueError, TypeError), match=f"from_torchao: .*{match}"):
                from_torchao(given)

    int8 = ao.Int8Tensor.from_hp
    refused(int8(w, ao.PerGroup(48)), r"layer.weight: 32 weights of a row or more must share a scale, got blocks of \[1, 48\]")
    refused(int8(w, ao.PerRow(), act_quant_scale=torch.ones(1, 1)), "layer.weight must have no act_quant_scale, got one with fixed values")
    refused(int8(w, ao.PerRow(), act_pre_scale=torch.ones(96)), "layer.weight must have no act_pre_scale, got one")
    refused(int8(w[None], ao.PerRow()), r"layer.weight must be the weight \[n, k\] of a linear layer, got \[1, 40, 96\]")
    refused(int8(w, ao.PerRow()), "layer.table must be the weight", "layer.table")
    kwargs = importlib.import_module("torchao.quantization.quantize_.workflows").QuantizeTensorToInt8Kwargs
    act = kwargs(granularity=ao.PerTensor())
    refused(int8(w, ao.PerRow(), act_quant_kwargs=act), "granularity of the activations of layer.weight must be PerRow.*PerTensor")
    act = kwargs(granularity=ao.PerRow(), reduce_range=True)
    refused(int8(w, ao.PerRow(), act_quant_kwargs=act), "reduce_range of layer.weight must be False")
    intx = ao.IntxUnpackedToInt8Tensor.from_hp
    refused(intx(w, (1, 32), torch.int1), "layer.weight: weight_dtype must be torch.int2 to torch.int8, got .*torch.int1")
    numbers = torch.zeros(8, 32, dtype=torch.int8), torch.ones(2, 8), torch.full((2, 8), 5001.3), [1, 32], torch.Size([8, 64])
    refused(ao.Int4Tensor(*numbers), "layer.weight: the range of each group must contain 0 or be near it, got a group whose middle is 5e\\+03 steps from 0")
    act = dict(activation_dtype=torch.float8_e4m3fn)
    refused(ao.Int4Tensor(*numbers, **act), "activation_dtype of layer.weight must be torch.bfloat16 .* got .*float8_e4m3fn")
    whole = ao.Int4Tensor(torch.zeros(2, 8, 32, dtype=torch.int8), torch.ones(2, 2, 8), torch.zeros(2, 2, 8), [1, 1, 32], torch.Size([2, 8, 64]))
    refused(whole, r"layer.weight must be the weight \[n, k\] of a linear layer, got \[2, 8, 32\]")
    e5m2 = ao.Float8Tensor.from_hp(w, float8_dtype=torch.float8_e5m2, granularity=ao.PerRow())
    refused(e5m2, "layer.weight must be float8_e4m3fn, got torch.float8_e5m2")


def test_files_that_are_not_torchaos_or_not_whole_are_refused(tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"weight": torch.ones(4, 4)}, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="from_torchao: .*plain.safetensors must be safetensors of torchao, got no tensor_names"):
        from_torchao(tmp_path / "plain.safetensors")
    with pytest.raises(FileNotFoundError, match="none.safetensors"):
        from_torchao(tmp_path / "none.safetensors")
    support = importlib.import_module("torchao.prototype.safetensors.safetensors_support")
    tensors, metadata = support.flatten_tensor_state_dict({"a.weight": ao.Int8Tensor.from_hp(torch.randn(8, 64), ao.PerRow())})
    del tensors["a._weight_scale"]
    safetensors.save_file(tensors, tmp_path / "part.safetensors", metadata)
    with pytest.raises(ValueError, match="must hold every part of a.weight, got no a._weight_scale"):
        from_torchao(tmp_path / "part.safetensors")
    tensors["a._weight_scale"] = torch.ones(3, 1)
    safetensors.save_file(tensors, tmp_path / "part.safetensors", metadata)
    with pytest.raises(ValueError, match=r"a.weight: n=8 k=64 must have one scale for each block of \[1, 64\], got 3"):
        from_torchao(tmp_path / "part.safetensors")
    metadata["a.weight"] = metadata["a.weight"].replace('"float32"', '"load"')
    safetensors.save_file(tensors, tmp_path / "part.safetensors", metadata)
    with pytest.raises(ValueError, match="the metadata must name dtypes of torch, got 'load'"):
        from_torchao(tmp_path / "part.safetensors")


def write(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write the state dict as torchao does."""
    support = importlib.import_module("torchao.prototype.safetensors.safetensors_support")
    tensors, metadata = support.flatten_tensor_state_dict(state)
    pytest.importorskip("safetensors.torch").save_file(tensors, folder / "model.safetensors", metadata)
    return folder / "model.safetensors"
