# SPDX-License-Identifier: Apache-2.0
"""linear and dequantize on the emulated GPU: within the budget of the CPU's rows, and their bits where arithmetic is exact."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from linear_calls import BY_WARPGROUPS, CASES, CODE_TILES, allowed_by_warpgroups, allowed_of_many_rows, row_of, run
from settings import forced

import lowbit
from lowbit import _C, testing
from lowbit.devices import simulated
from lowbit.testing import LinearCase, assert_within, cached_data, make_data

simulated.enable()
DEVICE, WIDE = "lowbit_sim:1", "lowbit_sim:0"  # of 2 and of 132 multiprocessors


def on_gpu(case: LinearCase, data: testing.LinearData | None = None, device: str = DEVICE) -> torch.Tensor:
    return run(case, device, row_of(case, "cuda_sim"), data)


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


@pytest.mark.parametrize("m, x_format", [(3, "float"), (3, "int8_row"), (70, "int8_row")])
def test_a_weight_at_an_odd_address_is_refused_by_name(m: int, x_format: str) -> None:
    """A view into a flat buffer: lanes read 8 bytes at a time, and a GPU stops at another address."""
    case = LinearCase(m, 40, 64, "bfloat16", "int8", 0, "symmetric", x_format, None)
    data = make_data(case)
    buffer = torch.zeros(data.packed.numel() + 8, dtype=torch.uint8, device=DEVICE)
    weight = buffer[8:].view(data.packed.shape).copy_(data.packed)
    refused = pytest.raises(NotImplementedError, match="a weight that does not begin at a multiple of 16 bytes")
    with refused, forced(row_of(case, "cuda_sim")):
        torch.ops.lowbit.linear(data.x.to(DEVICE), weight, *case.op_args)


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


@pytest.mark.parametrize("format", testing.dense_formats())
def test_dequantize_gives_what_the_cpu_gives(format: str) -> None:
    kind = _C.FORMAT_FACTS[format]["kind"]
    for group_size, mapping in [(0, "symmetric")] if kind == "float" else [(0, "symmetric"), (32, "symmetric")] + [(128, "asymmetric")] * (kind == "integer"):
        packed = testing.pack_weight(torch.randn(19, 150), format, group_size, mapping)
        numbers = 19, 150, _C.FORMATS[format], group_size, mapping == "asymmetric"
        wanted = torch.ops.lowbit.dequantize(packed, *numbers)
        with forced("dequantize_panels_cuda_sim"):
            there = torch.ops.lowbit.dequantize(packed.to(DEVICE), *numbers)
            halves = [torch.ops.lowbit.dequantize(packed.to(DEVICE), *numbers, like=there[:0].to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
        torch.testing.assert_close(there.cpu(), wanted, rtol=2.0**-22, atol=0)
        assert all(torch.equal(half.cpu(), there.cpu().to(half.dtype)) for half in halves)


def look_up(indices: torch.Tensor, weight: torch.Tensor, layout: str, format: str, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    like, numbers = torch.empty(0, dtype=dtype, device=weight.device), (19, 150, _C.FORMATS[format], group_size, False)
    return torch.ops.lowbit.embedding(weight, indices.to(weight.device), like, *numbers, _C.LAYOUTS[layout])


@pytest.mark.parametrize("layout", _C.LAYOUTS)
@pytest.mark.parametrize("format, group_size", [("int4", 32), ("int3", 0), ("nf4", 64), ("float16", 0)])
def test_looking_up_rows_has_the_bits_of_the_cpu(format: str, group_size: int, layout: str) -> None:
    packed = testing.pack_weight(torch.randn(19, 150), format, group_size, "symmetric")
    weight = testing.repack(packed, _C.LAYOUT, layout, 19, 150, format, group_size)
    for dtype, indices in ((torch.float32, torch.arange(19)), (torch.bfloat16, torch.tensor([[3, 0], [18, 3]], dtype=torch.int32)), (torch.float16, torch.tensor(7))):
        with lowbit.force_kernel("dequantize_rows_cuda_sim"):
            there = look_up(indices, weight.to(DEVICE), layout, format, group_size, dtype).cpu()
        assert torch.equal(there, look_up(indices, weight, layout, format, group_size, dtype))


@pytest.mark.parametrize("outside", [-1, 19, 2**40])
def test_looking_up_another_row_ends_the_launch(outside: int) -> None:
    packed = testing.pack_weight(torch.randn(19, 150), "int8", 0, "symmetric").to(DEVICE)
    with lowbit.force_kernel("dequantize_rows_cuda_sim"), pytest.raises(RuntimeError, match="dequantize of int8 in x86-panel-16x64.*LAUNCH_FAILED"):
        look_up(torch.tensor([3, outside]), packed, _C.LAYOUT, "int8", 0, torch.float32)


def test_a_call_is_two_launches_and_leaves_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[8]
    on_gpu(case)
    log, before = tmp_path / "log", simulated.live_bytes(DEVICE)
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(log))
    on_gpu(case)
    launches = [line.split()[:4] for line in log.read_text().splitlines() if line.startswith("launch")]
    assert launches == [["launch", "activations", "8", "256"], ["launch", "linear", "2", "256"]]  # of 3 panels, two to a CTA
    assert simulated.live_bytes(DEVICE) == before


IN_PLACE = [
    LinearCase(m, 37, k, "bfloat16", format, group_size, mapping, "float", None)
    for m, k, format, group_size, mapping in (
        (1, 192, "int4", 128, "symmetric"),
        (9, 256, "int4", 32, "asymmetric"),
        (33, 64, "int4", 64, "symmetric"),
        (3, 640, "int8", 0, "symmetric"),
        (20, 128, "int3", 32, "asymmetric"),
        (8, 64, "fp8_e4m3", 0, "symmetric"),
        (5, 64, "fp4_e2m1", 16, "symmetric"),
        (17, 704, "bfloat16", 0, "symmetric"),
        (1, 320, "nf4", 64, "symmetric"),
        (11, 128, "fp4", 32, "symmetric"),
    )
]


def in_order(case: LinearCase, data: testing.LinearData) -> torch.Tensor:
    """The same by activations that a kernel puts in order first: their address is no multiple of 16."""
    buffer = torch.zeros(data.x.numel() + 4, dtype=data.x.dtype, device=DEVICE)
    x = buffer[4:].view(data.x.shape).copy_(data.x)
    with forced(row_of(case, "cuda_sim")):
        return torch.ops.lowbit.linear(x, data.packed.to(DEVICE), *case.op_args, None, 0, None, None).cpu()


@pytest.mark.parametrize("case", IN_PLACE, ids=str)
def test_activations_of_bfloat16_are_read_in_place(case: LinearCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(tmp_path / "log"))
    data = cached_data(case)
    y = on_gpu(case)
    assert [line.split()[1] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("launch")] == ["linear"]
    assert_within(y, data.wanted, data.allowed, str(case))
    if case.format in ("nf4", "fp4"):  # levels in two parts, in order in three
        torch.testing.assert_close(y, in_order(case, data), rtol=2.0**-7, atol=2.0**-12)
    else:
        assert torch.equal(y, in_order(case, data))


@pytest.mark.parametrize("factor", [1e-38, 1e-36, 1e30])
@pytest.mark.parametrize("format", ["int4", "int8", "bfloat16"])
def test_tiny_and_huge_activations_in_place(format: str, factor: float) -> None:
    case = LinearCase(3, 16, 64, "bfloat16", format, 64 if format == "int4" else 0, "symmetric", "float", None)
    data = make_data(case, (torch.randn(3, 64) * factor).bfloat16())
    assert_within(on_gpu(case, data), data.wanted, data.allowed, str(case))


def test_a_row_in_place_with_inf_or_nan_alone_is_not_finite() -> None:
    case = LinearCase(4, 20, 192, "bfloat16", "int4", 64, "symmetric", "float", None)
    x = torch.randn(4, 192).bfloat16()
    x[1, 7], x[2, 129] = torch.inf, torch.nan
    y = on_gpu(case, make_data(case, x))
    assert y[[0, 3]].isfinite().all() and not y[1:3].isfinite().any()


SPLIT = [
    LinearCase(m, 20, 2100, dtype, format, group_size, mapping, x_format, *post_ops)
    for m, dtype, format, group_size, mapping, x_format, *post_ops in (
        (1, "bfloat16", "int4", 128, "symmetric", "float", "float32", "silu", True, True),
        (9, "float32", "int8", 0, "symmetric", "int8_row", None, "none", False, False),
        (3, "float16", "int8", 256, "asymmetric", "int8_group", None, "none", False, False),
        (2, "float32", "nf4", 64, "symmetric", "float", None, "none", False, False),
    )
]
SPLIT += [LinearCase(9, 20, 2112, "bfloat16", "int4", 128, "asymmetric", "float", None)]  # in place


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_k_is_split_where_columns_are_few(case: LinearCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(tmp_path / "log"))
    data = cached_data(case)
    y = on_gpu(case, device=WIDE)
    launches = [line.split()[1:3] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("launch")]
    ctas = "4" if case.format == "nf4" else "2"  # of 2 panels, 33 tiles
    of_row = 1 if case.x_format == "int8_row" else min(132 // case.m, 5)  # of 33 tiles, 8 each
    in_order = [["activations", str(case.m * of_row)]] if case.k == 2100 else []
    assert launches == [*in_order, ["linear", ctas], ["add_splits", "1"]]
    assert_within(y, data.wanted, data.allowed, str(case))
    if case.x_format == "int8_row":
        assert torch.equal(y, run(case, "cpu", row_of(case, "scalar")))
    if case.m > 1:  # a row has the same bits in any batch
        one = LinearCase(1, *[getattr(case, name) for name in ("n", "k", "dtype", "format", "group_size", "mapping", "x_format")])
        assert torch.equal(on_gpu(one, replace(data, x=data.x[:1].contiguous(), bias=None, mul=None, add=None), WIDE), y[:1])


def test_a_row_of_splits_with_inf_or_nan_alone_is_not_finite() -> None:
    case = LinearCase(3, 16, 2100, "float32", "float32", 0, "symmetric", "float", None)
    x = torch.randn(3, 2100)
    x[1, 2000], x[2, 7] = torch.inf, torch.nan
    y = on_gpu(case, make_data(case, x), WIDE)
    assert y[0].isfinite().all() and y[1].isinf().all() and y[2].isnan().all()


def by_tiles(case: LinearCase, data: testing.LinearData | None = None) -> torch.Tensor:
    return run(case, DEVICE, "linear_code_tiles_cuda_sim", data)


@pytest.mark.parametrize("case", CODE_TILES, ids=str)
def test_tiles_of_codes_are_within_budget_of_the_float64_reference(case: LinearCase) -> None:
    data = cached_data(case)
    y = by_tiles(case)
    assert_within(y, data.wanted, data.allowed, str(case))
    if case.format == "int8" and case.group_size == 0 and case.mapping == "symmetric":
        assert torch.equal(y, run(case, "cpu", row_of(case, "scalar")))


def test_a_row_of_tiles_with_inf_or_nan_alone_is_not_finite() -> None:
    x = torch.randn(140, 130)
    x[1, 7], x[35, 129] = torch.inf, torch.nan
    y = by_tiles(case := LinearCase(140, 20, 130, "float32", "int4", 64, "symmetric", "int8_group", None), make_data(case, x))
    bad = torch.tensor([1, 35])
    assert y[bad].isnan().all() and y[[i for i in range(140) if i not in (1, 35)]].isfinite().all()


MANY_ROWS = [
    LinearCase(m, n, k, dtype, format, group_size, mapping, "float", *post_ops)
    for m, n, k, dtype, format, group_size, mapping, *post_ops in (
        (256, 37, 150, "bfloat16", "int4", 32, "asymmetric", "float32", "silu", True, True),
        (257, 16, 64, "float16", "int8", 0, "symmetric", None, "none", False, False),
        (300, 33, 96, "float16", "nf4", 64, "symmetric", "dtype of x", "gelu", False, True),
        (256, 20, 70, "bfloat16", "fp8_e4m3", 0, "symmetric", "float32", "none", False, False),
        (260, 48, 130, "bfloat16", "bfloat16", 0, "symmetric", None, "relu", True, False),
        (128, 17, 300, "float16", "int3", 128, "symmetric", None, "none", False, False),
        (270, 33, 192, "bfloat16", "int4", 64, "asymmetric", None, "none", False, False),  # products are the results
        (256, 20, 128, "bfloat16", "nf4", 64, "symmetric", None, "none", False, False),
    )
]


def of_many_rows(case: LinearCase, data: testing.LinearData | None = None) -> torch.Tensor:
    return run(case, DEVICE, "linear_decoded_cublas_sim", data)


@pytest.mark.parametrize("case", MANY_ROWS, ids=str)
def test_many_rows_are_multiplied_by_cublas(case: LinearCase) -> None:
    data = cached_data(case)
    assert_within(of_many_rows(case), data.wanted, allowed_of_many_rows(case, data), str(case))


def by_warpgroups(case: LinearCase, data: testing.LinearData | None = None) -> torch.Tensor:
    return run(case, DEVICE, "linear_wgmma_cuda_sim", data)


@pytest.mark.parametrize("case", BY_WARPGROUPS, ids=str)
def test_products_of_warpgroups_are_within_budget_of_the_float64_reference(case: LinearCase) -> None:
    data = cached_data(case)
    y = by_warpgroups(case)
    assert_within(y, data.wanted, allowed_by_warpgroups(case, data), str(case))
    if case.format == "int8" and case.activation == "none" and case.x_format == "int8_row" and case.group_size == 0:
        assert torch.equal(y, run(case, "cpu", row_of(case, "scalar")))


@pytest.mark.parametrize("x_format, format, group_size", [("float", "nf4", 64), ("int8_row", "int8", 0), ("int8_group", "int4", 32)])
def test_a_row_of_warpgroups_with_inf_or_nan_alone_is_not_finite(x_format: str, format: str, group_size: int) -> None:
    x = torch.randn(40, 130).bfloat16()
    x[1, 7], x[35, 129] = torch.inf, torch.nan
    y = by_warpgroups(case := LinearCase(40, 20, 130, "bfloat16", format, group_size, "symmetric", x_format, None), make_data(case, x))
    assert not y[[1, 35]].isfinite().any() and y[[i for i in range(40) if i not in (1, 35)]].isfinite().all()


def test_what_warpgroups_do_not_multiply_is_refused_in_words() -> None:
    def reason(m: int, dtype: str = "bfloat16", format: str = "int4", x_format: str = "float", n: int = 8192, group_size: int = 64) -> str:
        rows = _C.explain_linear(m, n, 128, _C.FORMATS[format], group_size, False, _C.X_FORMATS[x_format], dtype, "lowbit_sim")
        return next(each["reason"] for each in rows if each["name"] == "linear_wgmma_cuda_sim")

    fits = {"a better row fits"}  # of the simulated device
    assert reason(16) == "fewer than 17 rows" and reason(32).startswith("fewer than 33 rows")
    assert {reason(33), reason(17, format="nf4"), reason(17, x_format="int8_row"), reason(9999, x_format="int8_row")} == fits
    assert {reason(513), reason(257, format="nf4")} == {"so many rows that cuBLAS takes less time"} and reason(1024, format="int8", group_size=0) in fits
    assert reason(4097, format="int8", x_format="int8_row", group_size=0).startswith("more than 4096 rows")
    assert reason(64, "float32").startswith("float32 activations") and reason(64, "float32", "int8", "int8_row", group_size=0) in fits
    assert reason(64, format="float32", group_size=0) == "a float32 weight"
    assert reason(64, format="fp8_e4m3", x_format="float8_row", group_size=0) == "float8 activations"
    assert reason(64, n=1024) == "columns for less than a sixteenth of the multiprocessors"


MANY_CODES = [
    LinearCase(m, n, k, dtype, format, 0, mapping, x_format, *post_ops)
    for m, n, k, dtype, format, mapping, x_format, *post_ops in (
        (256, 37, 150, "bfloat16", "int8", "symmetric", "int8_row", "float32", "silu", True, True),
        (300, 16, 64, "float32", "int8", "symmetric", "int8_row", None, "none", False, False),
        (257, 33, 99, "float16", "int8", "symmetric", "int8_row_asymmetric", "dtype of x", "none", False, False),
        (256, 20, 70, "float32", "int4", "symmetric", "int8_row", None, "none", False, False),
        (256, 20, 300, "bfloat16", "int3", "symmetric", "int8_row_asymmetric", None, "gelu", False, True),
    )
]


@pytest.mark.parametrize("case", MANY_CODES, ids=str)
def test_many_rows_of_codes_are_multiplied_by_cublas(case: LinearCase) -> None:
    data = cached_data(case)
    y = run(case, DEVICE, "linear_codes_cublas_sim")
    assert_within(y, data.wanted, data.allowed, str(case))
    if case.format == "int8" and case.activation == "none" and case.x_format == "int8_row":  # of int4 the CPU takes 8 off later
        assert torch.equal(y, run(case, "cpu", row_of(case, "scalar")))


@pytest.mark.parametrize("activation, kernels", [("relu", ["decode_columns", "finish_products"]), ("none", ["decode_columns"])])
def test_many_rows_of_a_wide_weight_go_in_parts(activation: str, kernels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = LinearCase(256, 128, 600_000, "bfloat16", "int4", 128, "symmetric", "float", None)
    packed = torch.zeros(_C.packed_shape(_C.LAYOUTS[_C.LAYOUT], 128, 600_000, _C.FORMATS["int4"], 128, False), dtype=torch.uint8)
    log = tmp_path / "log"
    monkeypatch.setenv("LOWBIT_EMULATED_NO_PRODUCTS", "1")
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(log))
    x = torch.zeros(256, 600_000, dtype=torch.bfloat16)
    with forced("linear_decoded_cublas_sim"):
        y = torch.ops.lowbit.linear(x.to(DEVICE), packed.to(DEVICE), *case.op_args, None, _C.ACTIVATIONS[activation], None, None)
    launches = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("launch")]
    assert launches == kernels * 2 and not y.cpu().any()


def test_what_cublas_cannot_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(m: int, dtype: str, format: str = "int4", x_format: str = "float", row: str = "") -> str:
        row = row or ("decoded_cublas" if x_format == "float" else "codes_cublas")
        group_size = 0 if format == "float32" else 64
        rows = _C.explain_linear(m, 64, 128, _C.FORMATS[format], group_size, False, _C.X_FORMATS[x_format], dtype, "lowbit_sim")
        return next(each["reason"] for each in rows if each["name"] == f"linear_{row}_sim")

    assert reason(127, "bfloat16") == "fewer than 128 rows"
    assert reason(256, "float32").startswith("float32")
    assert reason(256, "bfloat16", "float32") == "a dense weight of another dtype"
    assert reason(256, "bfloat16", "int4", "int8_group") == "a scale for each group of activations"
    assert reason(256, "bfloat16", "int4", "int8_row") == "a weight with groups or zero points"
    assert reason(128, "bfloat16", "int4", "int8_row", "code_tiles_cuda") == "fewer than 129 rows"
    assert reason(164, "bfloat16", "int4", "float", "code_tiles_cuda") == "float activations"
    assert reason(164, "bfloat16", "int4", "int8_row", "code_tiles_cuda") == "fewer tiles than half of the multiprocessors"
    monkeypatch.setenv("LOWBIT_EMULATED_NO_ALGORITHM", "1")
    assert reason(999, "bfloat16") == "cuBLAS has no algorithm for these sizes and alignments (status 15)"


def test_a_failing_product_says_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_EMULATED_FAIL", "cublasLtMatmul:13")
    with pytest.raises(RuntimeError, match="cublasLtMatmul of 257 x 16 x 64 failed: status 13 of cuBLAS"):
        of_many_rows(MANY_ROWS[1])


def test_a_layer_moves_there_and_back_as_it_is() -> None:
    layer = torch.nn.Linear(96, 48)
    model = torch.nn.Sequential(layer)
    lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32))
    x = torch.randn(5, 96)
    wanted, packed = model(x), model[0].weight.clone()
    model.to(DEVICE)
    with forced("linear_int4_cuda_sim"):
        there = model(x.to(DEVICE)).cpu()
    torch.testing.assert_close(there, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.cpu()[0].weight, packed)


def test_a_sum_that_no_int32_holds_is_refused_by_name() -> None:
    (row,) = [r for r in _C.explain_linear(1, 16, 131136, _C.FORMATS["int8"], 0, False, _C.X_FORMATS["int8_row"], "float32", "lowbit_sim")
              if r["name"] == "linear_int8_int8_cuda_sim"]  # fmt: skip
    assert not row["chosen"] and "k above 131072" in row["reason"]


A_RING_THAT_TURNS = LinearCase(3, 48, 4224, "bfloat16", "int4", 32, "symmetric", "int8_group", None)  # 9 tiles a warp
A_RING_OF_WARPGROUPS = LinearCase(40, 20, 1100, "bfloat16", "int8", 0, "symmetric", "int8_row", None)  # 9 tiles a split


BARRIERS = {  # of files with kernels of their own; the others are of products of few rows
    "wgmma": (by_warpgroups, allowed_by_warpgroups, [A_RING_OF_WARPGROUPS, *(case for case in BY_WARPGROUPS if case.format in ("nf4", "int7"))]),
    "code_tiles": (by_tiles, lambda case, data: data.allowed, [CODE_TILES[0]]),
    "decoded": (of_many_rows, allowed_of_many_rows, [MANY_ROWS[2]]),
    "product": (on_gpu, lambda case, data: data.allowed, [CASES[6], CASES[5], CASES[12], IN_PLACE[3], A_RING_THAT_TURNS]),
}


def test_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by test_emulated.py once as it is, and for each barrier without it, what its file is for."""
    of = os.environ.get("LOWBIT_BARRIERS_OF")
    chosen = BARRIERS if of is None else {of: BARRIERS.get(of, BARRIERS["product"])}
    for on_device, allowed, case in [(device, allowed, case) for device, allowed, cases in chosen.values() for case in cases]:
        results = []
        # The table of levels is missed only where its warp sleeps at first.
        for seed in range(24 if case.format == "nf4" and on_device is on_gpu else 4):
            monkeypatch.setenv("LOWBIT_EMULATED_SEED", str(seed))
            results.append(on_device(case))
        data = cached_data(case)
        assert all(torch.equal(a, b) for a, b in zip(results[1:], results, strict=False))
        assert_within(results[0], data.wanted, allowed(case, data), str(case))
