# SPDX-License-Identifier: Apache-2.0
"""Tensors, programs and quantized layers on `lowbit_ze`; the GPU is zsim."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import another_device
import pytest
import torch
from another_device import CONFIGS, check_against_the_cpu, model
from torch import nn
from torch.nn import functional

import lowbit
from lowbit import _C, devices
from lowbit.devices import level_zero

level_zero.enable()
DEVICE = "lowbit_ze:0"


def live_bytes() -> int:
    gc.collect()
    return torch.lowbit_ze.memory_allocated()


def test_torch_knows_the_gpus_by_their_names() -> None:
    level_zero.enable()
    assert level_zero.enabled() and torch.lowbit_ze.device_count() == torch.accelerator.device_count() == 1
    assert torch.lowbit_ze.get_device_name(0) == "zsim" and torch.lowbit_ze.is_available()
    assert torch.lowbit_ze.mem_get_info()[1] == 1 << 34
    assert lowbit.info()["level_zero"].startswith("zsim; /") and lowbit.info()["level_zero"].endswith("for torch: lowbit_ze")
    assert not any("lowbit_ze" in name or "xpu" in name for name in lowbit.info())


@pytest.mark.parametrize("dtype", another_device.DTYPES)
def test_values_survive_the_way_there_and_back(dtype: torch.dtype) -> None:
    another_device.check_values(dtype, DEVICE)


def test_factories_and_views() -> None:
    another_device.check_views(DEVICE)
    x = torch.zeros(4, 6, device="lowbit_ze")
    assert x.device == torch.device(DEVICE) and torch.full_like(x, 2).sum().item() == 48
    assert torch.empty(0, 3, device=DEVICE).clone().shape == (0, 3)


def test_memory_is_given_back() -> None:
    before = live_bytes()
    x = torch.ones(1000, device=DEVICE)
    view = x[10:]
    del x
    assert live_bytes() - before == 4000
    del view
    assert live_bytes() == before and torch.lowbit_ze.max_memory_allocated() >= before + 4000


def test_devices_do_not_mix_and_a_number_does() -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="at least two devices"):
        x + torch.ones(3)
    assert torch.equal(x + torch.tensor(2.0), x + 2)
    with pytest.raises(RuntimeError, match="there is no lowbit_ze:1, Level Zero has 1 GPUs"):
        torch.empty(1, device="lowbit_ze:1")


def test_a_model_trains_as_on_the_cpu() -> None:
    another_device.check_training(DEVICE)


def test_ops_without_kernels_here_run_on_the_cpus() -> None:
    for function, shapes in (
        (functional.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3)]),
        (functional.scaled_dot_product_attention, [(1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)]),
    ):
        check_against_the_cpu(function, shapes, DEVICE)


def test_saving_loading_and_copying() -> None:
    another_device.check_files_and_copies(DEVICE)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_quantized_there_has_the_weights_and_numbers_of_one_quantized_here(config: object) -> None:
    here, there = model(), model().to(DEVICE)
    lowbit.quantize_(here, config)
    lowbit.quantize_(there, config)
    assert torch.equal(there[0].weight.cpu(), here[0].weight) and there[0].weight.device == torch.device(DEVICE)
    x = torch.randn(3, 64)
    with torch.no_grad():
        result = there(x.to(DEVICE))
    assert result.device == torch.device(DEVICE) and _C.last_kernel("linear").endswith("_level_zero")
    # A code of an activation may be another one where its scale's last bit is: a step of int8 in one of 64 products.
    torch.testing.assert_close(result.cpu(), here(x), rtol=0, atol=1e-2 if "dynamic" in str(config).lower() else 1e-4)
    moved = copy.deepcopy(here).to(DEVICE)
    with torch.no_grad():
        assert torch.equal(moved(x.to(DEVICE)), result)


def test_quantized_layers_move_there() -> None:
    torch.manual_seed(0)
    there, tokens = nn.Sequential(nn.Embedding(50, 128), nn.Linear(128, 48)), torch.tensor([[1, 7, 49]])
    here = copy.deepcopy(there)

    def every_layer(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Embedding | nn.Linear)

    lowbit.quantize_(here, lowbit.int4_weight_only(32), every_layer)
    lowbit.quantize_(there, lowbit.int4_weight_only(32), every_layer, device=DEVICE)
    for one, other in zip(here, there, strict=True):
        assert other.weight.device == torch.device(DEVICE) and torch.equal(other.weight.cpu(), one.weight)
    assert torch.equal(there[0](tokens.to(DEVICE)).cpu(), here[0](tokens))
    assert (there(tokens.to(DEVICE)).cpu() - here(tokens)).norm() <= 1e-5 * here(tokens).norm()


def test_from_pretrained_quantizes_to_the_gpu_that_a_device_map_names(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(tmp_path)
    config = lowbit.LowbitConfig(lowbit.int4_weight_only(32))
    here, there = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map={"": device})
        for device in ("cpu", DEVICE)
    )
    theirs = dict(there.named_parameters())
    for name, weight in here.named_parameters():
        assert theirs[name].device == torch.device(DEVICE) and torch.equal(theirs[name].cpu(), weight), name


def test_gradients_of_a_quantized_layer_stay_there() -> None:
    layers = [nn.Sequential(nn.Linear(64, 40)), None]
    lowbit.quantize_(layers[0], lowbit.int8_weight_only())
    layers[1] = copy.deepcopy(layers[0]).to(DEVICE)
    values, gradients = torch.randn(2, 64), []
    for layer, device in zip(layers, ("cpu", DEVICE), strict=True):
        x = values.clone().to(device).requires_grad_()
        layer(x).square().sum().backward()
        assert x.grad.device == torch.device(device)
        gradients.append(x.grad.cpu())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


def test_rows_and_explanations_show_the_device() -> None:
    rows = {str(row["name"]) for row in lowbit.kernels("linear") if row["device"] == "lowbit_ze"}
    assert rows and all(name.endswith("_level_zero") for name in rows) and devices.list() == ["cpu", DEVICE]
    layer = nn.Sequential(nn.Linear(64, 64))
    lowbit.quantize_(layer, lowbit.int8_weight_only())
    (entry,) = lowbit.explain(layer.to(DEVICE))
    assert entry.row == "linear_int8_level_zero"


def test_ops_without_rows_there_say_so() -> None:
    x = torch.ones(2, 64, device=DEVICE)
    packed = torch.zeros(_C.packed_shape(_C.LAYOUTS[_C.LAYOUT], 64, 64, 3, 0, False), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(NotImplementedError, match="repack: no kernel row fits"):
        _C.repack(packed, _C.LAYOUTS[_C.LAYOUT], torch.empty_like(packed), _C.LAYOUTS[_C.LAYOUT], 64, 64, 3, 0, False)
    with pytest.raises(ValueError, match="op: x must be on the CPU, got lowbit_ze:0"):
        devices.check("op", "x", x.device, kernel="score_program")
    packed = torch.empty(_C.packed_shape(0, 64, 64, 3, 0, False), dtype=torch.uint8)
    with pytest.raises(ValueError, match="linear: weight must be on lowbit_ze:0 as x is, got cpu"):
        torch.ops.lowbit.linear(x, packed, 64, 64, 3, 0, False, 0)
