# SPDX-License-Identifier: Apache-2.0
"""linear and dequantize on the emulated GPU: within the budget of the CPU's rows, and their bits where arithmetic is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from linear_calls import CASES, row_of, run

import lowbit
from lowbit import _C, testing
from lowbit.devices import simulated
from lowbit.testing import LinearCase, assert_within, cached_data, make_data

simulated.enable()
DEVICE = "lowbit_sim:1"


def on_gpu(case: LinearCase, data: testing.LinearData | None = None) -> torch.Tensor:
    return run(case, DEVICE, row_of(case, "cuda_sim"), data)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_are_within_budget_of_the_float64_reference(case: LinearCase) -> None:
    data = cached_data(case)
    assert_within(on_gpu(case), data.wanted, data.allowed, str(case))


@pytest.mark.parametrize("case", [case for case in CASES if case.x_format.startswith("int8") and case.group_size == 0 and not case.asymmetric], ids=str)
def test_sums_of_codes_have_the_bits_of_the_cpu(case: LinearCase) -> None:
    assert torch.equal(on_gpu(replace(case, activation="none")), run(replace(case, activation="none"), "cpu", row_of(case, "scalar")))


@pytest.mark.parametrize("m", [1, 8, 9, 17, 70])
@pytest.mark.parametrize("format, x_format", [("int4", "float"), ("int4", "int8_group")])
def test_any_number_of_rows(m: int, format: str, x_format: str) -> None:
    data = cached_data(case := LinearCase(m, 20, 600, "bfloat16", format, 32, "symmetric", x_format, None))
    assert_within(on_gpu(case), data.wanted, data.allowed, str(case))


@pytest.mark.parametrize("factor", [1e-42, 1e-39, 1e30])
@pytest.mark.parametrize("format", ["float32", "nf4", "int4"])
def test_tiny_and_huge_activations_keep_their_bits(format: str, factor: float) -> None:
    case = LinearCase(3, 16, 64, "float32", format, 0 if format == "float32" else 64, "symmetric", "float", None)
    x = torch.randn(3, 64) * factor
    data = make_data(case, x)
    assert_within(on_gpu(case, data), data.wanted, data.allowed, str(case))


@pytest.mark.parametrize("format, x_format", [("float32", "float"), ("nf4", "float"), ("int4", "float"), ("int4", "int8_group"), ("fp8_e4m3", "float8_row")])
def test_rows_with_inf_or_nan_alone_are_not_finite(format: str, x_format: str) -> None:
    group_size = 0 if format == "float32" else 64
    case = LinearCase(4, 20, 130, "float32", format, group_size, "symmetric", x_format, None)
    x = torch.randn(4, 130)
    x[1, 7], x[2, 129] = torch.inf, torch.nan
    y, wanted = on_gpu(case, make_data(case, x)), cached_data(case)
    assert y[[0, 3]].isfinite().all() and not y[2].isfinite().any(), wanted
    assert not y[1].isfinite().any() if x_format != "int8_group" else y[1].isnan().all()
    if format == "float32":  # no part of a finite weight makes nan of inf
        assert y[1].isinf().all()


@pytest.mark.parametrize("format", [name for name in _C.FORMATS])
def test_dequantize_gives_what_the_cpu_gives(format: str) -> None:
    kind = _C.FORMAT_FACTS[format]["kind"]
    for group_size, mapping in [(0, "symmetric")] if kind == "float" else [(0, "symmetric"), (32, "symmetric")] + [(128, "asymmetric")] * (kind == "integer"):
        packed = testing.pack_weight(torch.randn(19, 150), format, group_size, mapping)
        numbers = 19, 150, _C.FORMATS[format], group_size, mapping == "asymmetric"
        wanted = torch.ops.lowbit.dequantize(packed, *numbers)
        _C.force_kernel("dequantize_panels_cuda_sim")
        try:
            there = torch.ops.lowbit.dequantize(packed.to(DEVICE), *numbers).cpu()
        finally:
            _C.force_kernel(None)
        torch.testing.assert_close(there, wanted, rtol=2.0**-22, atol=0)


def test_a_call_is_two_launches_and_leaves_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[8]
    on_gpu(case)
    log, before = tmp_path / "log", simulated.live_bytes(DEVICE)
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(log))
    on_gpu(case)
    launches = [line.split()[:4] for line in log.read_text().splitlines() if line.startswith("launch")]
    assert launches == [["launch", "activations", "8", "256"], ["launch", "linear", "3", "256"]]
    assert simulated.live_bytes(DEVICE) == before


def test_a_layer_moves_there_and_back_as_it_is() -> None:
    layer = torch.nn.Linear(96, 48)
    model = torch.nn.Sequential(layer)
    lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32))
    x = torch.randn(5, 96)
    wanted, packed = model(x), model[0].weight.clone()
    model.to(DEVICE)
    _C.force_kernel("linear_int4_cuda_sim")
    try:
        there = model(x.to(DEVICE)).cpu()
    finally:
        _C.force_kernel(None)
    torch.testing.assert_close(there, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.cpu()[0].weight, packed)


def test_a_sum_that_no_int32_holds_is_refused_by_name() -> None:
    (row,) = [r for r in _C.explain_linear(1, 16, 131136, _C.FORMATS["int8"], 0, False, _C.X_FORMATS["int8_row"], "float32", "lowbit_sim")
              if r["name"] == "linear_int8_int8_cuda_sim"]  # fmt: skip
    assert not row["chosen"] and "k above 131072" in row["reason"]


def test_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by test_emulated.py once as it is and once without each barrier."""
    for case in (CASES[6], CASES[5], CASES[12]):
        results = []
        for seed in ("0", "1", "2", "3"):
            monkeypatch.setenv("LOWBIT_EMULATED_SEED", seed)
            results.append(on_gpu(case))
        data = cached_data(case)
        assert all(torch.equal(a, b) for a, b in zip(results[1:], results, strict=False))
        assert_within(results[0], data.wanted, data.allowed, str(case))
