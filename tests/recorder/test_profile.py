# SPDX-License-Identifier: Apache-2.0
"""lowbit.profile: what it counts, its table and picture; our names in torch's profiler."""

from __future__ import annotations

import sys
import time

import pytest
import torch

import lowbit
from lowbit import _C, recorder
from lowbit.recorder import profile as module
from lowbit.recorder.roofline import Limits, limits

LIMITS = Limits(2, 10e9, 100e9, 400e9, "float32 FMA_x", "int8 products_x")


@pytest.fixture(autouse=True)
def known_limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "measured" not in request.node.name:
        monkeypatch.setattr(module, "limits", lambda threads: LIMITS)


def layer() -> torch.nn.Module:
    made = torch.nn.Linear(256, 64)
    lowbit.quantize_(made, lowbit.int8_dynamic_activation_int8_weight())
    return made


def test_rows_calls_bytes_and_operations_are_counted() -> None:
    net, x = layer(), torch.ones(8, 256)
    with lowbit.profile() as p:
        with torch.inference_mode():
            for _ in range(5):
                net(x)
        lowbit.scaled_dot_product_attention(*torch.randn(3, 1, 2, 40, 16))
    rows = {row.op: row for row in p.rows()}
    assert set(rows) == {"linear", "attention_forward"} and len(p.records) == 6
    linear = rows["linear"]
    assert linear.calls == 5 and linear.row == _C.last_kernel("linear") and linear.arithmetic == "int8"
    assert linear.operations == 5 * 2 * 8 * 256 * 64
    assert linear.moved == 5 * (4 * 8 * 256 + net.weight.numel() + 4 * 64 + 4 * 8 * 64)
    assert rows["attention_forward"].operations == 2 * 2 * 40 * 40 * 32
    assert 0 < linear.seconds < p.seconds
    text = repr(p.table())
    assert linear.row in text and "limits, on 2 threads: 10.0 GB/s read; 100 Gop/s (float32 FMA_x)" in text
    assert f"{linear.operations_per_s / 400e9:.0%}" in text and "all, of " in text and " 6 " in text
    assert "<td" in p._repr_html_() and "Gop/s" in p._repr_html_()


def test_what_is_not_in_rows_is_in_ops_of_torch_and_in_python() -> None:
    net, x = layer(), torch.ones(8, 256)
    with torch.inference_mode(), lowbit.profile(torch_ops=True) as p:
        for _ in range(5):
            net(x).sin()
        for _ in range(14):  # more kinds of ops than are shown
            x.cos().tan().exp().neg().abs().sqrt().floor().ceil().round().sign().sigmoid().tanh()
        time.sleep(0.05)
    ops = {op.name: op for op in p.torch_ops}
    assert ops["aten::sin"].calls == 5 and ops["lowbit::linear"].calls == 5 and ops["aten::tanh"].calls == 14
    lines = {cells[0]: cells for cells in p.table()._cells()}
    told = [name for name in lines if name.startswith("aten::")]
    assert len(told) == 10 and lines["other ops of torch"][1] == str(sum(op.calls for op in ops.values()) - 5 - sum(int(lines[name][1]) for name in told))
    assert lines["lowbit's ops around rows"][1] == "5" and float(lines["Python"][2]) >= 50
    total = sum(float(cells[2]) for cells in p.table()._cells()[len(p.rows()) :])
    assert abs(total - 1e3 * p.seconds) < 0.02  # of rows, which are in the line of all, and of the rest


def test_without_torch_ops_nothing_is_told_of_them() -> None:
    with lowbit.profile() as p:
        layer()(torch.ones(1, 256)).sin()
    assert p.torch_ops == [] and p.table()._cells()[-1][0].startswith("all, of ")


def test_a_call_inside_of_another_is_counted_once() -> None:
    """As where a row runs ops: made of two records, since no row of ours does."""
    with lowbit.profile() as p:
        layer()(torch.ones(1, 256))
    outer = p.records[-1]
    inner = recorder.Record(**{name: getattr(outer, name) for name in outer.__slots__} | {"depth": 1, "row": "inner"})
    p.records = [outer, inner]
    total = p.table()._cells()[-1]
    assert total[1] == "1" and total[2] == f"{1e3 * outer.seconds:.3f}" and len(p.rows()) == 2


def test_profiles_overlap_and_need_no_recorder(python) -> None:
    net, x = layer(), torch.ones(1, 256)
    with lowbit.profile() as outer:
        net(x)
        with lowbit.profile() as inner:
            net(x)
        net(x)
    assert (len(outer.records), len(inner.records)) == (3, 1)
    with pytest.raises(RuntimeError, match="must be entered once"), outer:
        pass
    with pytest.raises(RuntimeError, match="the `with` block must have ended"):
        lowbit.profile().table()
    with pytest.raises(ValueError, match="boom"), lowbit.profile() as failed:
        raise ValueError("boom")
    assert failed.records == [] and "all, of" in repr(failed.table())
    code = """
import sys; sys.modules["torch"] = None
import numpy
from lowbit import _C
begin = _C.recorder.begin_profile()
_C.all_finite(numpy.ones(3, numpy.float32))
print(len(_C.recorder.end_profile(begin)))
_C.all_finite(numpy.ones(3, numpy.float32))
print(_C.recorder.begin_profile())
"""
    assert python(code, LOWBIT_RECORD="0") == "256\n0\n"


def test_measured_limits_are_those_of_a_machine() -> None:
    """No speed is asserted: int8 products are at least as fast as FMAs, memory slower than registers."""
    measured = limits(1)
    isas = _C.isa()["compiled"]
    assert measured.float32_of.startswith("float32 FMA_") and measured.float32_of.removeprefix("float32 FMA_") in isas
    assert measured.int8_of.removeprefix("int8 products_") in isas
    assert 0 < measured.bandwidth < measured.float32 and measured.int8 > measured.float32 / 2
    with pytest.raises(ValueError, match="peak_rate: threads and repeats must be at least 1, got 0 and 5"):
        _C.recorder.peak_rate("float", 0)


def test_the_roofline_has_a_point_for_each_row_that_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib draws it")
    plt.switch_backend("agg")
    with lowbit.profile() as p:
        layer()(torch.ones(8, 256))
    ax = p.plot()
    ax.figure.canvas.draw()
    names = [text.get_text() for text in ax.texts]
    assert names == [_C.last_kernel("linear")], "quantize has no products"
    assert len(ax.lines) == 2 and ax.get_xscale() == ax.get_yscale() == "log"
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="profile.plot needs matplotlib"):
        p.plot()


def test_ops_have_their_names_in_torch_s_profiler() -> None:
    net, x = layer(), torch.ones(1, 256)
    parameter = torch.nn.Parameter(torch.ones(64))
    parameter.grad = torch.ones(64)
    optimizer = lowbit.optim.AdamW8bit([parameter])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        net(x)
        lowbit.scaled_dot_product_attention(*torch.randn(3, 1, 2, 40, 16))
        optimizer.step()
    counts = {event.key: event.count for event in p.key_averages()}
    assert counts["lowbit::linear"] == counts["lowbit::attention_forward"] == counts["lowbit::optim_step_"] == 1
