# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN without a GPU: the real library makes plans for devices that a text describes. tools/cudnn_headers
brings what it needs; numbers are for a GPU (test_on_gpu.py)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cudnn_calls import CALLS, NAMES, Call, ask, make
from tests import internals

import lowbit
from lowbit import _C

HERE = Path(__file__).parent
MISSING = _C.cuda.cudnn_missing()
needs_cudnn = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} (tools/cudnn_headers)")

# Name, multiprocessors, shared memory and threads of a multiprocessor, CTAs of one, L2 cache, memory.
DEVICES = {
    80: ("NVIDIA A100-SXM4-80GB", 108, 166912, 2048, 32, 41943040, 80 << 30),
    86: ("NVIDIA GeForce RTX 3090", 82, 101376, 1536, 16, 6291456, 24 << 30),
    89: ("NVIDIA L40S", 142, 101376, 1536, 24, 100663296, 48 << 30),
    90: ("NVIDIA H100 80GB HBM3", 132, 232448, 2048, 32, 52428800, 80 << 30),
    100: ("NVIDIA B200", 148, 232448, 2048, 32, 132644864, 180 << 30),
    120: ("NVIDIA GeForce RTX 5090", 170, 101376, 1536, 24, 100663296, 32 << 30),
}


def description(capability: int) -> str:
    """A device as cuDNN writes it."""
    name, multiprocessors, shared, threads, ctas, cache, memory = DEVICES[capability]
    return json.dumps({
        "deviceName": name, "cudaDeviceId": 0, "deviceVer": 10 * capability, "driverVer": 13000,
        "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": threads, "regsPerBlock": 65536, "multiProcessorCount": multiprocessors, "warpSize": 32,
        "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": shared, "reservedSharedMemoryPerBlock": 1024,
        "maxRegistersPerSM": 65536, "maxCtasPerSM": ctas, "pciDeviceId": 1, "isTccDriver": 0, "supportCoopLaunch": 1,
        "smClockRateKHz": 1980000, "memClockRateKHz": 2619000, "l2CacheSize": cache, "totalGlobalMem": memory,
    })  # fmt: skip


PLANS = """
import json, sys
import torch
from cudnn_calls import CALLS, ask, make
from tests import internals
for line in sys.stdin:
    device, capability, *call = json.loads(line)
    if len(call) == 1:
        call, = (known for known in CALLS if known.name == call[0])
        made = ask(call, make(call), device=device, compute_capability=capability)
    else:
        made = internals.attention_plan(device, capability, *call)
    made["image"] = len(made["image"])
    print(json.dumps(made), flush=True)
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[dict[str, object]]]]:
    """Make plans in a process whose libcuda.so.1 is that of a machine without a GPU: one for all, since its start takes as long as four plans."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine: it makes libcuda.so.1")
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["g++", *flags, str(HERE / "driver_without_gpu.cpp"), "-o", str(folder / "libcuda.so.1")], check=True)
    libraries = [str(path) for entry in sys.path for path in Path(entry).glob("nvidia/*/lib")]
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join([str(folder), *libraries])}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    command, errors = [sys.executable, "-c", PLANS], folder / "errors"
    with errors.open("w") as to, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=to, env=environment, text=True) as process:

        def plan(capability: int, *call: Any) -> dict[str, object]:
            try:
                process.stdin.write(json.dumps([description(capability), capability, *call]) + "\n")
                process.stdin.flush()
                said = process.stdout.readline()
            except BrokenPipeError:
                said = ""
            assert said, f"{call}: the process that plans has ended: {errors.read_text()[-4000:]}"
            return json.loads(said)

        yield lambda *calls: [plan(*call) for call in calls]


# batch, heads, kv_heads, q_length, kv_length, e, ev
GROUPED, PADDED, WIDE, TWO_WIDTHS = (2, 32, 8, 4096, 4096, 128, 128), (2, 16, 16, 1000, 1000, 64, 64), (1, 8, 8, 2048, 2048, 256, 256), (1, 8, 8, 2048, 2048, 192, 128)


@needs_cudnn
@pytest.mark.parametrize("capability", DEVICES)
def test_plans_are_made_within_the_cap_and_read_back(capability: int, plans: Callable[..., list[dict[str, object]]]) -> None:
    calls = [(capability, sizes, dtype, causal, backward) for sizes, dtype, causal in ((GROUPED, "bfloat16", True), (PADDED, "float16", False)) for backward in (False, True)]
    for made in plans(*calls):
        assert made["refused"] == "" and made["again"] == ""
        assert 0 <= made["workspace"] == made["workspace_again"] <= made["max_workspace"] and made["image"] > 10_000
        assert made["cut"].startswith("cuDNN: ")


@needs_cudnn
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_masks_few_queries_and_windows_are_planned_and_take_every_tensor_of_the_call(capability: int, plans: Callable[..., list[dict[str, Any]]]) -> None:
    """Planned, not run."""
    for call, made in zip(CALLS, plans(*((capability, call.name) for call in CALLS)), strict=True):
        assert made["refused"] == "" and made["again"] == "", (call, made["refused"], made["again"])
        assert 0 <= made["workspace"] == made["workspace_again"] <= made["max_workspace"], call
        given = {NAMES[number] for number, address in enumerate(made["addresses"]) if address}
        assert {NAMES[number] for number in made["tensors"]} == given == set(make(call)), call
        assert made["tensors"] == made["tensors_again"] == sorted(made["tensors"]), call


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_plan_gets_all_of_a_call(call: Call) -> None:
    tensors = make(call)
    got = ask(call, tensors)
    batch, heads, kv_heads, queries, keys, e, ev = call.sizes
    end = call.position + queries if call.causal and call.op == "decode" else keys
    first = max(0, call.position + 1 - call.window) if call.window else 0
    assert got["sizes"] == [batch, heads, kv_heads, queries, end - first, e, ev] and got["scale"] == 0.5
    starts = {"k": tensors["k"][:, :, first:], "v": tensors["v"][:, :, first:], "mask": tensors["mask"][..., first:] if call.mask else None}
    wanted = {name: (starts.get(name) if name in starts else tensors.get(name)) for name in NAMES}
    assert got["addresses"] == [0 if tensor is None else tensor.data_ptr() for tensor in wanted.values()]
    for strides, name in zip(got["strides"], NAMES, strict=False):
        if name in tensors:
            shape, given = tensors[name].shape, tensors[name].stride()
            assert all(got_one == one for got_one, one, size in zip(strides, given, shape, strict=False) if size > 1), name
    assert got["has_lse"] == call.lse and got["ends_together"] == (call.op == "decode")
    assert got["causal"] == (call.causal and (call.op != "decode" or queries > 1))
    assert got["window"] == (call.window if queries > 1 else 0)
    if call.mask:
        assert got["bias_size"] == [*call.mask[:3], 1 if call.mask[3] == 1 else end - first]
        stretched = torch.empty(call.mask, dtype=call.mask_dtype)
        assert all(a == b for a, b, size in zip(got["bias_stride"], stretched.stride(), call.mask, strict=True) if size > 1)


def test_a_cache_that_is_longer_than_its_window_needs_one_plan() -> None:
    call = next(call for call in CALLS if call.name == "a chunk, a window")
    shapes = []
    for position in (2048, 2560):
        got = ask(replace(call, position=position), make(call))
        got.pop("addresses")
        shapes.append(got)
    assert shapes[0] == shapes[1]


@needs_cudnn
def test_what_cudnn_refuses_is_said_in_its_words(plans: Callable[..., list[dict[str, object]]]) -> None:
    odd = (1, 4, 4, 100, 100, 100, 100)
    calls = ((90, WIDE, "bfloat16", True, True), (90, TWO_WIDTHS, "bfloat16", True, True), (89, WIDE, "bfloat16", True, False), (89, WIDE, "bfloat16", True, True), (90, odd, "float16", False, False))
    assert [made["refused"] for made in plans(*calls[:3])] == ["", "", ""]
    for made in plans(*calls[3:]):
        assert "hidden_dim should be" in made["refused"] and made["image"] == 0


@needs_cudnn
def test_a_device_that_is_no_description_is_refused() -> None:
    made = internals.attention_plan("{}", 90, PADDED, "bfloat16", False, False)
    assert made["refused"].startswith("cuDNN: ") and made["image"] == b""


def test_info_says_whether_there_are_rows_of_cudnn() -> None:
    assert lowbit.info()["cuda attention by cuDNN"] == (MISSING or "yes")


def test_rows_of_cudnn_that_ran_are_listed_first_the_others_last_and_none_are_those_of_the_cpu() -> None:
    for op in ("attention_forward", "attention_backward"):
        cuda = [row["name"] for row in _C.kernels(op) if row["device"] == "cuda"]
        assert cuda[0] == f"{op}_cudnn"
    for op, row in (("attention_forward", "attention_forward_bias_cudnn"), ("decode", "decode_cudnn")):  # planned, never run: last
        assert [row["name"] for row in _C.kernels(op) if row["device"] == "cuda"][-1] == row
    q = torch.randn(1, 2, 64, 16)
    with lowbit.force_kernel("attention_forward_cudnn"), pytest.raises(NotImplementedError, match="attention_forward_cudnn: runs on cuda, and the call is on cpu"):
        lowbit.scaled_dot_product_attention(q, q, q)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: numbers of cuDNN are its own")


def inputs(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    batch, heads, kv_heads, q_length, kv_length, e, ev = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = ((heads, q_length, e), (kv_heads, kv_length, e), (kv_heads, kv_length, ev), (heads, q_length, ev))
    return [torch.randn(batch, *shape, generator=generator).to(dtype).to(device) for shape in shapes]


def attend(tensors: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in tensors[:3])
    out = lowbit.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    out.backward(tensors[3])
    return [tensor.detach().double().cpu() for tensor in (out, q.grad, k.grad, v.grad)]


@pytest.mark.gpu
@needs_cudnn
@on_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(2, 8, 2, 300, 300, 128, 128), (2, 4, 4, 64, 77, 40, 40), (1, 2, 2, 130, 70, 64, 64)])
def test_results_and_gradients_are_those_of_float64(sizes: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    got = attend(inputs(sizes, dtype, "cuda"), causal)
    assert _C.last_kernel("attention_forward") == "attention_forward_cudnn"
    wanted = attend([tensor.double() for tensor in inputs(sizes, dtype, "cpu")], causal)
    for name, a, b in zip(("out", "grad_q", "grad_k", "grad_v"), got, wanted, strict=True):
        # Probabilities and gradients of scores are rounded to 16 bits before the second product, results after it.
        assert (a - b).norm() <= 4 * torch.finfo(dtype).eps * b.norm(), (name, (a - b).norm() / b.norm())


@pytest.mark.gpu
@needs_cudnn
@on_gpu
def test_a_graph_replays_attention_and_none_is_planned_while_it_is_captured() -> None:
    tensors = inputs((1, 4, 4, 128, 128, 64, 64), torch.bfloat16, "cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        wanted = lowbit.scaled_dot_product_attention(*tensors[:3])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = lowbit.scaled_dot_product_attention(*tensors[:3])
        assert _C.last_kernel("attention_forward") == "attention_forward_cudnn"
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, wanted)
