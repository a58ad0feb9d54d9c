# SPDX-License-Identifier: Apache-2.0
"""quantize and all_finite on the emulated GPU: the bytes of the CPU."""

from __future__ import annotations

import pytest
import torch
from quantize_calls import assert_as_on_the_cpu, calls

import lowbit
from lowbit import _C, testing
from lowbit.devices import simulated
from lowbit.testing.cases import empty_packed

simulated.enable()
DEVICE, ROW = "lowbit_sim:1", "quantize_panels_cuda_sim"


@pytest.mark.parametrize("format", testing.dense_formats())
def test_bytes_are_those_of_the_cpu(format: str) -> None:
    assert_as_on_the_cpu(format, DEVICE, ROW)


def test_a_semi_sparse_weight_is_refused_by_name() -> None:
    weight, packed = torch.randn(16, 64), testing.pack_weight(torch.randn(16, 64), "int8_semi_sparse")
    numbers = 16, 64, _C.FORMATS["int8_semi_sparse"], 0, False
    x, packed = torch.randn(3, 64).to(DEVICE), packed.to(DEVICE)
    calls = {
        ROW: lambda: _C.quantize(weight.to(DEVICE), torch.empty_like(packed), *numbers[2:], 0),
        "dequantize_panels_cuda_sim": lambda: torch.ops.lowbit.dequantize(packed, *numbers),
        "linear_code_tiles_cuda_sim": lambda: torch.ops.lowbit.linear(x, packed, *numbers, 0, None, 0, None, None),
    }
    for name, call in calls.items():
        with lowbit.force_kernel(name), pytest.raises(NotImplementedError, match=f"{name}: a 2:4 weight, which only CPUs read"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inf_and_nan_are_found_wherever_they_are(dtype: torch.dtype) -> None:
    with lowbit.force_kernel("all_finite_cuda_sim"):
        for count, at in ((1, 0), (300, 299), (4097, 4096), (1024 * 4096 + 5, 1024 * 4096 + 4)):
            x = torch.full((count,), torch.finfo(dtype).max, dtype=dtype)
            assert _C.all_finite(x.to(DEVICE))
            for value in (torch.inf, -torch.inf, torch.nan):
                x[at] = value
                assert not _C.all_finite(x.to(DEVICE))


def test_a_weight_with_inf_is_refused_and_nothing_written() -> None:
    weight, packed = torch.ones(4, 64), torch.full_like(empty_packed(4, 64, "int8"), 7).to(DEVICE)
    weight[2, 3] = torch.inf
    with pytest.raises(ValueError, match="quantize: weight must be finite, got inf or nan"):
        _C.quantize(weight.to(DEVICE), packed, _C.FORMATS["int8"], 0, False, 0)
    assert packed.cpu().eq(7).all()


def test_a_graph_that_is_captured_cannot_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    call = next(calls("int8"))
    monkeypatch.setenv("LOWBIT_EMULATED_CAPTURING", "1")
    with pytest.raises(RuntimeError, match="quantize: waits for the results of its kernels"):
        call.run(DEVICE, ROW)
    with lowbit.force_kernel("all_finite_cuda_sim"), pytest.raises(RuntimeError, match="all_finite: waits"):
        _C.all_finite(call.weight.to(DEVICE))


@pytest.mark.parametrize("function", ["cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"])
def test_a_failing_driver_is_an_error_that_passes(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = next(calls("nf4"))
    wanted = call.run(DEVICE, ROW)[0]
    monkeypatch.setenv("LOWBIT_EMULATED_FAIL", f"{function}:2")
    with pytest.raises(RuntimeError, match="quantize failed: CUDA_ERROR_OUT_OF_MEMORY"):
        call.run(DEVICE, ROW)
    monkeypatch.delenv("LOWBIT_EMULATED_FAIL")
    assert torch.equal(call.run(DEVICE, ROW)[0], wanted)


def test_barriers() -> None:
    for format in ("int4", "nf4", "bfloat16"):
        for call in list(calls(format))[:24]:
            with lowbit.force_kernel("all_finite_cuda_sim"):
                finite = torch.tensor(_C.all_finite(call.weight.to(DEVICE)))
            assert all(torch.equal(a, b) for a, b in ((finite, torch.tensor(True)),))
            (packed, sums), (wanted, wanted_sums) = call.run(DEVICE, ROW), call.run("cpu", "quantize_panels_scalar")
            normal = (wanted_sums > 1e-30) & (wanted_sums < 1e30)
            close = torch.isclose(sums, wanted_sums, rtol=1e-4) | ~normal
            assert all(torch.equal(a, b) for a, b in ((packed, wanted), (close, torch.ones(3, dtype=torch.bool))))
