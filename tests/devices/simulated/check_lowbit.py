# SPDX-License-Identifier: Apache-2.0
"""lowbit's own ops on the device: the bits of the CPU, results there, errors that name the place."""

from __future__ import annotations

import copy

import pytest
import torch
from another_device import CONFIGS, model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit
from lowbit import _C, devices, testing
from lowbit.devices import simulated

simulated.enable()
DEVICE = "lowbit_sim:1"


@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_quantized_there_gives_the_bits_of_one_quantized_here(config: object) -> None:
    here, there = model(), model().to(DEVICE)
    lowbit.quantize_(here, config)
    lowbit.quantize_(there, config)
    x = torch.randn(3, 64)
    result = there(x.to(DEVICE))
    assert result.device == torch.device(DEVICE) and torch.equal(result.cpu(), here(x))
    assert torch.equal(there[0].weight.cpu(), here[0].weight) and there[0].weight.device == torch.device(DEVICE)
    moved = copy.deepcopy(here).to(DEVICE)
    assert torch.equal(moved(x.to(DEVICE)).cpu(), here(x))


def test_the_ops_have_kernels_of_their_own_there() -> None:
    for row in lowbit.ops.registration.registered():
        assert torch._C._dispatch_has_kernel_for_dispatch_key(row["op"], "PrivateUse1"), row
    layer = nn.Sequential(nn.Linear(64, 64)).to(DEVICE)
    lowbit.quantize_(layer, lowbit.int8_weight_only())
    x = torch.randn(2, 64, device=DEVICE)
    before = simulated.launches(DEVICE)
    with torch.no_grad(), lowbit.force_kernel("linear_int8_scalar_sim"):
        layer(x)
    assert _C.last_kernel("linear") == "linear_int8_scalar_sim" and simulated.launches(DEVICE) == before + 1
    with pytest.raises(NotImplementedError, match="linear_int8_scalar: runs on cpu, and the call is on lowbit_sim:1"):
        with torch.no_grad(), lowbit.force_kernel("linear_int8_scalar"):
            layer(x)


def test_rows_explanations_and_facts_show_the_device() -> None:
    rows = {row["name"]: row for row in lowbit.kernels("linear")}
    of_cpu = [name for name, row in rows.items() if row["device"] == "cpu" and row["available"]]
    here = [name for name in of_cpu if not name.endswith("_onednn")]  # which the simulated device has none of
    there = [name for name, row in rows.items() if row["device"] == "lowbit_sim"]
    assert there == [f"{name}_sim" for name in here] and all(rows[name]["available"] for name in there)
    layer = nn.Sequential(nn.Linear(64, 64))
    lowbit.quantize_(layer, lowbit.int8_weight_only())
    row = lowbit.explain(layer)[0].row
    layer.to(DEVICE)
    (entry,) = lowbit.explain(layer)
    assert entry.row == f"{row}_sim" and len(entry.others) == len(there) - 1
    report = lowbit.quantize_(nn.Sequential(nn.Linear(64, 64)).to(DEVICE), lowbit.int8_weight_only())
    assert {name.split(" ")[0] for layer in report.quantized for name in layer.kernel.split(", ")} <= set(there)
    assert lowbit.info()["devices"] == "cpu, lowbit_sim:0, lowbit_sim:1"
    assert not any(name.startswith("device ") for name in lowbit.info())


def test_a_weight_is_repacked_and_dequantized_there() -> None:
    n, k, *rest = arguments = 20, 70, _C.FORMATS["int8"], 0, False
    here = testing.pack_weight(torch.randn(n, k), "int8")
    there = here.to(DEVICE)
    rows, back = (torch.empty(_C.packed_shape(layout, n, k, *rest), dtype=torch.uint8, device=DEVICE) for layout in (1, 0))
    _C.repack(there, 0, rows, 1, *arguments)
    _C.repack(rows, 1, back, 0, *arguments)
    assert torch.equal(back.cpu(), here)
    dense = torch.ops.lowbit.dequantize(there, *arguments)
    assert torch.equal(dense.cpu(), torch.ops.lowbit.dequantize(here, *arguments))
    assert torch.ops.lowbit.dequantize(there, *arguments).device == torch.device(DEVICE)
    assert all(_C.last_kernel(op).endswith("_sim") for op in ("repack", "dequantize"))


def test_a_call_joins_the_current_stream_of_its_device() -> None:
    layer, x = nn.Sequential(nn.Linear(64, 64)).to(DEVICE), torch.randn(2, 64, device=DEVICE)
    optimizer = lowbit.optim.AdamW8bit(layer.parameters())
    layer(x).sum().backward()
    optimizer.step()
    lowbit.quantize_(layer, lowbit.int8_weight_only())
    stream = torch.Stream(DEVICE)
    with stream, torch.no_grad():
        for run in (lambda: layer(x), optimizer.step, lambda: _C.all_finite(x), lambda: x + 1):
            before = simulated.launches(DEVICE, stream)
            run()
            assert simulated.launches(DEVICE, stream) > before
    before = simulated.launches(DEVICE, stream)
    with torch.no_grad():
        layer(x)
    assert simulated.launches(DEVICE, stream) == before


def test_gradients_of_a_quantized_layer_stay_there() -> None:
    layer = nn.Sequential(nn.Linear(64, 64)).to(DEVICE)
    lowbit.quantize_(layer, lowbit.int8_weight_only())
    x = torch.randn(2, 64, device=DEVICE, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.device == torch.device(DEVICE) and x.grad.abs().sum() > 0


class Products(TorchDispatchMode):
    """Notes the dtypes of matrices that are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.dtypes += [matrix.dtype for matrix in args[:2]]
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gradient_of_the_input_is_a_product_in_its_dtype_there(dtype: torch.dtype) -> None:
    """On the CPU float16 is multiplied in float32; a GPU is some ten times as fast in 16 bits."""
    layer = nn.Sequential(nn.Linear(64, 64)).to(DEVICE)
    lowbit.quantize_(layer, lowbit.int8_weight_only())
    x = torch.randn(2, 64, device=DEVICE, dtype=dtype, requires_grad=True)
    with Products() as products:
        layer(x).sum().backward()
    assert products.dtypes == [dtype, dtype] and x.grad.dtype is dtype
    wanted = layer[0].dequantize().double().cpu().sum(0)
    assert torch.allclose(x.grad.double().cpu(), wanted.expand(2, -1), rtol=0.02, atol=0.02)


def attend(q, k, v, device):
    bias = torch.linspace(-1, 1, 2, device=device)
    blocks = lowbit.create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40, device=device)
    return lowbit.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j), block_mask=blocks)


def test_flex_attention_and_its_gradients_have_the_bits_of_the_cpu() -> None:
    here = [torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3)]
    there = [tensor.detach().to(DEVICE).requires_grad_() for tensor in here]
    mine, theirs = attend(*here, "cpu"), attend(*there, DEVICE)
    assert theirs.device == torch.device(DEVICE) and torch.equal(theirs.cpu(), mine)
    mine.sum().backward()
    theirs.sum().backward()
    for a, b in zip(here, there, strict=True):
        assert torch.equal(b.grad.cpu(), a.grad)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_scaled_dot_product_attention_has_the_bits_of_the_cpu(dropout_p: float) -> None:
    q = torch.randn(1, 2, 40, 16)
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(1)
        x = q.to(device)
        results.append(lowbit.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=dropout_p).cpu())
    assert torch.equal(*results)


def test_a_quantized_cache_attends_there() -> None:
    q, k, v = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9, 64)
    results = []
    for device in ("cpu", DEVICE):
        cache = lowbit.QuantizedKVCache()
        cache.append(0, k.to(device), v.to(device))
        results += [cache.attend(0, q.to(device)).cpu(), cache.attend(0, k.to(device), window=3).cpu()]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit", "Lion8bit", "SGD8bit"])
def test_an_optimizer_steps_there_as_here(optimizer: str) -> None:
    here, there = model(), model().to(DEVICE)
    steps = [getattr(lowbit.optim, optimizer)(m.parameters(), lr=1e-2) for m in (here, there)]
    for _ in range(3):
        x = torch.randn(2, 64)
        for m, step, device in ((here, steps[0], "cpu"), (there, steps[1], DEVICE)):
            for parameter in m.parameters():
                parameter.grad = torch.full_like(parameter, 0.01) * x[0, 0].to(device)
            step.step()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert b.device == torch.device(DEVICE) and torch.equal(b.cpu(), a)
    for state in steps[1].state.values():
        assert {value.device for name, value in state.items() if name != "step"} == {torch.device(DEVICE)}


def test_tensors_of_two_places_are_refused_by_name() -> None:
    q = torch.randn(1, 2, 8, 16, device=DEVICE)
    with pytest.raises(ValueError, match="attention_forward: key must be on lowbit_sim:1 as query is, got lowbit_sim:0"):
        lowbit.scaled_dot_product_attention(q, q.to("lowbit_sim:0"), q)
    packed = torch.empty(_C.packed_shape(0, 64, 64, 3, 0, False), dtype=torch.uint8)
    with pytest.raises(ValueError, match="linear: weight must be on lowbit_sim:1 as x is, got cpu"):
        torch.ops.lowbit.linear(torch.randn(2, 64, device=DEVICE), packed, 64, 64, 3, 0, False, 0)
    with pytest.raises(ValueError, match="quantize: packed must be on lowbit_sim:1 as weight is, got cpu"):
        _C.quantize(torch.randn(64, 64, device=DEVICE), packed, 3, 0, False, 0)
    bias = torch.zeros(2)
    with pytest.raises(ValueError, match=r"attention_forward: score_captured\[0\] must be on lowbit_sim:1, got cpu"):
        lowbit.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + bias[h])
    parameter, there = torch.zeros(4), torch.zeros(4, device=DEVICE)
    with pytest.raises(ValueError, match=r"optim_step: states\[0\] must be on cpu, got lowbit_sim:1"):
        _C.OptimStep(2, 0, 256, [parameter], [parameter], [[there]], [], [torch.zeros(())], {})


def test_a_fault_surfaces_as_an_exception_and_leaves_nothing_behind() -> None:
    q = torch.randn(1, 2, 8, 16, device=DEVICE)
    before = simulated.live_bytes(DEVICE)
    simulated.inject("launch", DEVICE)
    with pytest.raises(RuntimeError, match="lowbit_sim:1: the launch failed"):
        lowbit.scaled_dot_product_attention(q, q, q)
    simulated.inject("memory", DEVICE)
    why = ".*out of memory" if torch.__version__ >= "2.13" else ""  # before, torch does not tell its reason
    with pytest.raises(RuntimeError, match=f"attention_forward: torch failed: allocation of the result{why}"):
        lowbit.scaled_dot_product_attention(q, q, q)
    assert simulated.live_bytes(DEVICE) == before
    assert lowbit.scaled_dot_product_attention(q, q, q).shape == q.shape


def test_the_devices_are_listed_and_checked_in_one_place() -> None:
    assert devices.list() == ["cpu", "lowbit_sim:0", "lowbit_sim:1"]
    devices.check("op", "x", torch.device(DEVICE))
    with pytest.raises(ValueError, match="op: x must be on the CPU or lowbit_sim, got meta"):
        devices.check("op", "x", torch.device("meta"))
