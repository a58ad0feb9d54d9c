# SPDX-License-Identifier: Apache-2.0
"""Linear4bit and Linear8bitLt of an unchanged program on our kernels: results, gradients, and weights that change."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("bitsandbytes")

LAYERS = """
import copy, io, os, sys, threading, warnings, torch, bitsandbytes as bnb, bitsandbytes.functional as F
from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit
warnings.simplefilter("ignore")
torch.manual_seed(0)

def layer4(n, k, quant_type="nf4", nested=True, bias=False, storage=torch.uint8, dtype=torch.float32):
    module = Linear4bit(k, n, bias, dtype, nested, quant_type, storage)
    return module.to("cpu").eval()

def scales(state):
    return F.dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax

def weight4(module):
    "The weight [n, k] in float64, from its codes."
    state = module.weight.quant_state
    n, k = state.shape
    pairs = module.weight.data.contiguous().view(torch.uint8).flatten()
    codes = torch.stack([pairs >> 4, pairs & 15], 1).flatten()[: n * k]
    spread = scales(state).repeat_interleave(state.blocksize)[: n * k]
    return (F.get_4bit_type(state.quant_type, device="cpu")[codes.int()].double() * spread.double()).view(n, k)

def check4(module, m=2, dtype=torch.float32, **tolerance):
    x = torch.randn(m, module.in_features).to(dtype)
    with torch.no_grad():
        y = module(x)
    bias = 0 if module.bias is None else module.bias.double()
    wanted = x.double() @ weight4(module).T + bias
    assert y.dtype == dtype and y.shape == wanted.shape
    error = ((y.double() - wanted).norm() / wanted.norm()).item()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype], (error, m, dtype)
    return y
"""


def test_linear4bit_is_the_product_with_its_codes(with_bitsandbytes):
    """Few rows and many; rows of whole blocks, blocks across rows (k = 96, 200), k no multiple of 8; every
    dtype and storage."""
    code = """
for quant_type in ("nf4", "fp4"):
    for nested in (False, True):
        for n, k in ((33, 64), (64, 256), (40, 96), (17, 200), (12, 70), (700, 1600)):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                module = layer4(n, k, quant_type, nested, bias=True, dtype=dtype)
                for m in (1, 5, 40):
                    check4(module, m, dtype)
for storage in (torch.bfloat16, torch.float32, torch.float16):
    check4(layer4(64, 256, storage=storage), 3)
module = layer4(64, 256)
x = torch.randn(2, 3, 256)
assert torch.equal(module(x)[1, 2], module(x[1])[2]) and module(x[:0]).shape == (0, 3, 64)
assert not getattr(module.weight.quant_state, "packing_format_for_cpu", False)
module.weight.quant_state.offset = module.weight.quant_state.offset.half()  # of a model that was stored so
check4(module)
print("agree")
"""
    assert with_bitsandbytes(LAYERS + code).split()[-1] == "agree"


def test_a_weight_that_changes_counts_from_the_next_call(with_bitsandbytes):
    code = """
module = layer4(64, 256)
for change in (
    lambda w: w.data.copy_(w.data.flip(0)),
    lambda w: w.data.numpy().__setitem__(slice(0, 100), 7),
    lambda w: setattr(w, "data", torch.randint(0, 256, w.shape, dtype=torch.uint8)),
    lambda w: w.quant_state.absmax.copy_(w.quant_state.absmax.flip(0)),
    lambda w: setattr(w.quant_state, "absmax", w.quant_state.absmax.flip(0).clone()),
    lambda w: w.quant_state.state2.absmax.mul_(2),
    lambda w: w.quant_state.offset.add_(0.5),
):
    x = torch.randn(1, 256)
    before = module(x)
    with torch.no_grad():
        change(module.weight)
    assert not torch.equal(module(x), before)
    check4(module, 1), check4(module, 30)
other = layer4(64, 256)
module.weight.data, module.weight.quant_state = other.weight.data, other.weight.quant_state
assert torch.equal(check4(module) * 0, check4(other) * 0)
twin = copy.deepcopy(module)
module.weight.data.zero_()
check4(twin), check4(module)
for _ in range(50):  # memory that was another weight's a moment ago
    check4(layer4(32, 128))
stored = io.BytesIO()
torch.save(other.state_dict(), stored)
stored.seek(0)
state = torch.load(stored)
loaded = Linear4bit(256, 64, False, torch.float32, quant_type="nf4").to("cpu").eval()
parts = {key.removeprefix("weight."): value for key, value in state.items() if key != "weight"}
loaded.weight = Params4bit.from_prequantized(state["weight"], parts, device="cpu")
x = torch.randn(3, 256)
assert torch.equal(loaded(x), other(x))
print("agree")
"""
    assert with_bitsandbytes(LAYERS + code).split()[-1] == "agree"


def test_gradients_are_those_of_the_dequantized_weight(with_bitsandbytes):
    """QLoRA: the weight is frozen, gradients go to x, to what is before it, and to the bias."""
    code = """
for n, k, m in ((64, 256, 1), (48, 96, 5), (700, 1600, 20)):
    for nested in (False, True):
        module = layer4(n, k, nested=nested, bias=True).train()
        x = torch.randn(m, k, requires_grad=True)
        y, out = module(x), torch.randn(m, n)
        y.backward(out)
        wanted = out.double() @ weight4(module)
        assert (x.grad.double() - wanted).norm() < 1e-6 * wanted.norm()
        assert torch.allclose(module.bias.grad, out.sum(0), atol=1e-5)
print("agree")
"""
    assert with_bitsandbytes(LAYERS + code).split()[-1] == "agree"


def test_threads_and_forked_processes(with_bitsandbytes):
    code = """
import os
modules = [layer4(64, 256) for _ in range(4)]
x = torch.randn(3, 256)
wanted = [module(x) for module in modules]
same = []
def run(i):
    same.append(all(torch.equal(modules[i](x), wanted[i]) for _ in range(50)))
threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert same == [True] * 4
torch.set_num_threads(1)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(modules[0](x), wanted[0]) else 1)
assert os.waitpid(child, 0)[1] == 0
print("agree")
"""
    assert with_bitsandbytes(LAYERS + code).split()[-1] == "agree"


EIGHT = """
results = {}
for n, k in ((33, 64), (64, 250), (300, 1024)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for threshold in (0.0, 3.0):
            for m in (1, 4, 40):
                torch.manual_seed(n + m)
                module = Linear8bitLt(k, n, bias=True, has_fp16_weights=False, threshold=threshold).to("cpu").eval()
                x = torch.randn(m, k).to(dtype)
                with torch.no_grad():
                    results[n, k, dtype, threshold, m] = module(x)
torch.save(results, sys.argv[1])
"""


def test_linear8bit_gives_the_bits_of_bitsandbytes(with_bitsandbytes, tmp_path):
    """The product is exact and scaled in the same order."""
    results = []
    for switch in ("1", "0"):
        with_bitsandbytes(LAYERS + EIGHT, str(tmp_path / f"{switch}.pt"), LOWBIT_BITSANDBYTES=switch)
        results.append(torch.load(tmp_path / f"{switch}.pt"))
    assert results[0].keys() == results[1].keys()
    for case, ours in results[0].items():
        assert torch.equal(ours, results[1][case]), case


def test_our_kernels_run(with_bitsandbytes):
    code = """
from lowbit import _C
module = layer4(64, 256)
module(torch.randn(1, 256))
assert _C.last_kernel("blocks_linear").startswith("blocks_linear_nf4_")
module(torch.randn(100, 256))
assert _C.last_kernel("blocks_dequantize").startswith("blocks_dequantize_nf4_")
Linear8bitLt(256, 64, has_fp16_weights=False).to("cpu").eval()(torch.randn(1, 256))
assert _C.last_kernel("int8_linear").startswith("int8_linear_")
print("ran")
"""
    assert with_bitsandbytes(LAYERS + code).split()[-1] == "ran"


def test_the_order_of_bitsandbytes_for_its_own_kernel_stays_with_it(with_bitsandbytes):
    """A weight that was brought into it (here by hand) goes to bitsandbytes' gemv_4bit."""
    code = """
from lowbit import _C
if not F.has_avx512bf16():
    print("skip"), sys.stdout.flush(), os._exit(0)
module = layer4(64, 256, nested=False)
x, weight = torch.randn(2, 256), weight4(module)
module.weight.data, module.weight.quant_state = F._convert_weight_packed_for_cpu(module.weight.data, module.weight.quant_state)
y = module(x)
assert _C.last_kernel("blocks_linear") == ""
wanted = x.double() @ weight.T
print("theirs", (y.double() - wanted).norm() / wanted.norm() < 2e-2)
"""
    out = with_bitsandbytes(LAYERS + code).split()
    if out[-1] == "skip":
        pytest.skip("bitsandbytes has a kernel of its own on a CPU with AVX512-BF16")
    assert out[-2:] == ["theirs", "tensor(True)"]


def test_arguments_that_do_not_fit_have_the_errors_of_bitsandbytes(with_bitsandbytes):
    code = """
packed, state = F.quantize_4bit(torch.randn(64, 256), quant_type="nf4")
for call in (
    lambda: torch.ops.bitsandbytes.gemm_4bit(torch.randn(2, 250), packed, [64, 256], state.absmax, 64, "nf4"),
    lambda: torch.ops.bitsandbytes.gemm_4bit(torch.randn(2, 256), packed[:100], [64, 256], state.absmax, 64, "nf4"),
    lambda: torch.ops.bitsandbytes.gemm_4bit(torch.randn(2, 256), packed, [64, 256], state.absmax, 64, "nf4", torch.randn(65)),
):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        assert "lowbit" not in str(error)
    else:
        raise AssertionError("was taken")
print("refused")
"""
    assert with_bitsandbytes(LAYERS + code).split()[-1] == "refused"
