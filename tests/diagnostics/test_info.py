# SPDX-License-Identifier: Apache-2.0
"""info() and `python -m lowbit`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from settings import ambient

import lowbit
from lowbit import _C
from lowbit.__main__ import main
from lowbit.ops.registration import registered


def test_info_tells_versions_isa_threads_ops_and_reasons() -> None:
    info = lowbit.info()
    assert info["version"] == lowbit.__version__ == _C.version
    assert info["torch"] == torch.__version__
    assert info["isa detected"] in info["isa compiled"]
    assert info["threads"].split(",")[0] == str(_C.threads()["count"])
    assert info["torch.ops.lowbit"] == f"{len(registered())} ops, c++ shims"
    assert "isa chosen" in repr(info) and "<table>" in info._repr_html_()


def test_a_backend_that_cannot_run_is_one_line_with_its_reason() -> None:
    rows, info = [row for row in lowbit.kernels("linear") if row["backend"] != "onednn"], lowbit.info()
    backends = {str(row["backend"]) for row in rows}
    running = {str(row["backend"]) for row in rows if row["available"]}
    assert {name for name in info if name.startswith("rows of ")} == {f"rows of {name}" for name in backends - running}
    for row in rows:
        assert row["backend"] in running or info[f"rows of {row['backend']}"] == f"not available: {row['reason']}"
    assert len(repr(info).splitlines()) < 40


def test_ops_that_are_registered_in_several_ways_are_named(monkeypatch) -> None:
    rows = [{"op": "lowbit::linear", "how": "c++ shims", "reason": ""}, {"op": "lowbit::ssd", "how": "python", "reason": "torch 2.10"}]
    monkeypatch.setattr("lowbit.diagnostics.info.registered", lambda: rows)
    assert lowbit.info()["torch.ops.lowbit"] == "c++ shims: linear; python (torch 2.10): ssd"


def test_a_machine_has_only_a_lesser_set_than_the_one_it_lacks() -> None:
    compiled = str(lowbit.info()["isa compiled"]).split(", ")
    for row in lowbit.kernels("linear"):
        if only := re.fullmatch(r"this machine has (\w+) only", str(row["reason"])):
            # Beside the others stands avx2_vnni, which AMD has from Zen 5 on, where Zen 4 has sets above it.
            assert row["backend"] == "avx2_vnni" or compiled.index(str(row["backend"])) < compiled.index(only[1])


def test_threads_are_those_of_torch() -> None:
    with ambient("threads 1"):
        assert _C.threads()["count"] == 1
    assert "torch" in _C.threads()["source"]


def test_threads_follow_the_quota_of_a_control_group() -> None:
    """docker's --cpus, Kubernetes' limits. The quota is that of a group around the process's own."""
    old = Path("/sys/fs/cgroup/cpu")
    group = (old if old.is_dir() else Path("/sys/fs/cgroup")) / f"lowbit_test_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no right to make a control group: {error}")
    try:
        if old.is_dir():
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("50000")
        else:
            (group / "cpu.max").write_text("50000 100000")
        (group / "inner").mkdir()
        enter = f"open('{group}/inner/cgroup.procs', 'w').write(str(os.getpid()))"
        code = f"import os; {enter}; import torch; torch.set_num_threads(4); from lowbit import _C; print(_C.threads())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout == str({"count": 1, "source": "the quota of this process's control group, 0.5 CPUs"}) + "\n", done.stderr
    except PermissionError as error:
        pytest.skip(f"no right to make a control group: {error}")
    finally:
        for made in (group / "inner", group):
            if made.is_dir():
                made.rmdir()


def test_command_line(capsys) -> None:
    assert main(["info"]) == 0
    assert "isa chosen" in capsys.readouterr().out
    assert main(["kernels"]) == 0
    assert "linear_" in capsys.readouterr().out
    done = subprocess.run([sys.executable, "-m", "lowbit", "info"], capture_output=True, text=True, timeout=60, check=True)
    assert "torch.ops.lowbit" in done.stdout


def test_version_and_errors_of_the_command_line(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"lowbit {lowbit.__version__}\n"
    assert main(["kernels", "nothing"]) == 1
    assert "op must be one of" in capsys.readouterr().err


def test_public_names_are_all_there() -> None:
    for name in lowbit.__all__:
        assert getattr(lowbit, name) is not None
    assert dir(lowbit) == lowbit.__all__ == sorted(set(lowbit.__all__))


def test_all_public_names_come_with_a_star() -> None:
    space: dict[str, object] = {}
    exec("from lowbit import *", space)
    assert set(lowbit.__all__) <= space.keys() and space["quantize_"] is lowbit.quantize_ and space["optim"] is lowbit.optim


def test_info_says_which_modules_for_intel_gpus_are_in_the_build_or_how_to_get_them() -> None:
    said, count = lowbit.info()["level_zero modules"], len(_C.level_zero.modules())
    if count:
        assert said == f"{count}, by {_C.level_zero.modules_compiler()}" and not _C.level_zero.modules_missing()
    else:
        assert said.startswith("none: this build has no SPIR-V modules: install clang")
