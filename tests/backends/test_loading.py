# SPDX-License-Identifier: Apache-2.0
"""Packages of others, good and faulty, beside each other: imports and ops work every time, and the report names the culprit."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable

import pytest
import torch
from packages import Packages

INSTALLED = any(entry.value == "lowbit_autoload:autoload" for entry in importlib.metadata.entry_points(group="torch.backends"))

ACCELERATOR = str(torch.accelerator.current_accelerator())

FAULTS = {
    "raises": "def register(api):\n    raise OverflowError('no such accelerator')\n",
    "exits": "def register(api):\n    raise SystemExit('no such licence')\n",
    "exits-at-import": "import sys\nsys.exit(3)\n",
    "misses-a-library": "import ctypes\nctypes.CDLL('libacme_runtime.so.4')\ndef register(api): pass\n",
    "misses-its-rows": "def register(api):\n    api.add_library('/nowhere/rows.so')\n",
    "claims-1": "import torch\ndef register(api):\n    torch.utils.rename_privateuse1_backend('acme')\n",
    "claims-2": "import torch\ndef register(api):\n    torch.utils.rename_privateuse1_backend('other')\n",
    "uses-an-op": "import lowbit\ndef register(api):\n    lowbit.kernels()\n",
    "half-good": "def register(api):\n    api.add_kernel('linear', 'linear_half_good', 'cpu', print)\n    raise KeyError('half')\n",
    "wrong-prefix": "def register(api):\n    api.add_kernel('linear', 'matmul_acme', 'cpu', print)\n",
    "wrong-op": "def register(api):\n    api.add_kernel('score_program', 'score_program_acme', 'cpu', print)\n",
    "wrong-device": "def register(api):\n    api.add_kernel('linear', 'linear_acme', 'npu', print)\n",
    "our-name": "def register(api):\n    api.add_kernel('linear', 'linear_float32_scalar', 'cpu', print)\n",
    "not-here": "def register(api):\n    return None\n",
}
TOLD = {
    "raises": "OverflowError: no such accelerator",
    "exits": "failed: SystemExit: no such licence",
    "exits-at-import": "failed: SystemExit: 3",
    "misses-a-library": "libacme_runtime.so.4: cannot open shared object file",
    "misses-its-rows": "/nowhere/rows.so: cannot be loaded",
    "claims-2": "RuntimeError: torch.register_privateuse1_backend() has already been set",
    "uses-an-op": "register() must not run an op or ask for kernel rows",
    "half-good": "KeyError: 'half'",
    "wrong-prefix": "wrong-prefix: the name of a row must begin with linear_, got 'matmul_acme'",
    "wrong-op": "op must be one that is offered (lowbit.backends.OPS), got 'score_program'",
    "wrong-device": "wrong-device: linear_acme: device must be one of cpu, ",
    "our-name": "our-name: there is a row 'linear_float32_scalar' already",
    "not-here": "it added nothing",
    "wrong-size": "lowbit_rows must have ",
    "wrong-version": "api_version must be 1, got 2",
    "wrong-args": "must be built with lowbit_linear_args of ",
    "wrong-symbol": "has no function lowbit_backend_rows",
}



@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    packages = Packages(tmp_path_factory.mktemp("packages"))
    for name, code in FAULTS.items():
        packages.add(name, code)
    packages.add_library("good")
    packages.add_library("wrong-size", "SIZE=sizeof(lowbit_rows)-8", 'NAME="linear_wrong_size"')
    packages.add_library("wrong-version", "VERSION=2", 'NAME="linear_wrong_version"')
    packages.add_library("wrong-args", "ARGS=sizeof(lowbit_linear_args)+8", 'NAME="linear_wrong_args"')
    packages.add_library("wrong-symbol", "SYMBOL=lowbit_backend_lines", 'NAME="linear_wrong_symbol"')
    return packages


MAPPED = """[line.split("/")[-1].strip() for line in open("/proc/self/maps") if any(name in line for name in ("libcuda", "libnvrtc", "libze_", "libOpenCL"))]"""
MATRIX = """
import json, sys
ORDER
state = lambda: [torch._C._get_privateuse1_backend_name(), str(torch.accelerator.current_accelerator()), str(torch.get_default_device())]
said = {"before": state(), "asked at import": "lowbit.backends.loading" in sys.modules}
said["op after bare torch"] = OP
import lowbit
said["mapped"] = MAPPED
said["asked at import"] |= "lowbit.backends.loading" in sys.modules
torch.set_grad_enabled(False)
lowbit.quantize_(layer := torch.nn.Sequential(torch.nn.Linear(32, 16)), lowbit.int8_weight_only())
said["finite"] = bool(layer(torch.ones(2, 32)).isfinite().all())
with lowbit.force_kernel("linear_test_good"):
    said["forced"] = layer(torch.ones(2, 32)).unique().tolist()
report = lowbit.backends.report()
said["order"] = [package.name for package in report]
said["reasons"] = {package.name: package.reason for package in report}
said["rows"] = {package.name: package.rows for package in report if package.rows}
said["text"] = str(report)
if "text" in sys.argv:  # asks every integration: 3 s
    said["info"] = {name: text for name, text in lowbit.info().items() if name.startswith("backend ")}
said["claimed by"] = torch._C._get_privateuse1_backend_name()
print(json.dumps(said))
"""


@pytest.mark.skipif(not INSTALLED, reason="lowbit is not installed with its entry points (run from a source tree)")
@pytest.mark.parametrize("switch", [None, "0", "1"])
@pytest.mark.parametrize("order", ["import torch", "import lowbit, torch"])
def test_faulty_packages_are_named_and_break_nothing(faulty: Packages, python: Callable[..., str], order: str, switch: str | None) -> None:
    environment = {} if switch is None else {"LOWBIT_AUTOLOAD": switch}
    of_torch = json.loads(python(f"import json, torch; print(json.dumps({MAPPED}))", TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    code = MATRIX.replace("MAPPED", MAPPED).replace("ORDER", order).replace("OP", "hasattr(torch.ops.lowbit, 'linear')")
    said = json.loads(python(code, "" if switch else "text", PYTHONPATH=faulty.path, LOWBIT_STRICT="0", **environment))

    assert said["before"] == ["privateuseone", ACCELERATOR, "cpu"] and said["asked at import"] is False
    assert said["op after bare torch"] is (switch != "0" or "lowbit" in order)
    assert f"lowbit: {'off: LOWBIT_AUTOLOAD=0' if switch == '0' else 'ran at import torch'}\n" in said["text"]
    assert set(said["mapped"]) <= set(of_torch), "a device's runtime was opened"
    assert said["finite"] and said["forced"] == [7.0]
    assert said["order"] == sorted([*FAULTS, "good", "wrong-args", "wrong-size", "wrong-symbol", "wrong-version"])
    assert said["rows"] == {"good": ["linear_test_good"]} and said["reasons"].pop("good") == ""
    assert said["claimed by"] == "acme" and said["reasons"].pop("claims-1") == "it added nothing"
    assert said["reasons"].keys() == TOLD.keys()
    for name, reason in said["reasons"].items():
        assert TOLD[name] in reason and f"{name} 1.0: {reason}" in said["text"]
    if switch is None:
        assert said["info"] == {f"backend {name}": said["reasons"][name] for name in TOLD} | {
            "backend good": "added linear_test_good", "backend claims-1": "it added nothing"
        }  # fmt: skip


CHOICE = """
import os, sys, threading, torch, lowbit
from lowbit import _C
torch.set_grad_enabled(False)
layer = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 9))
lowbit.quantize_(layer, lowbit.int8_weight_only())
x = torch.ones(2, 32)
child = os.fork()
if not child:
    layer[0](x); os._exit(0 if _C.last_kernel("linear") == "linear_test_eager" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
ran = []
threads = [threading.Thread(target=lambda: (layer[0](x.clone()), ran.append(_C.last_kernel("linear")))) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert ran == ["linear_test_eager"] * 4, ran  # a row that says `first`
layer[1](torch.ones(2, 16))
assert _C.last_kernel("linear").startswith("linear_int8_"), "eager refuses n = 9"
explained = lowbit.explain(layer)
print(explained)
print(lowbit.kernels("linear"))
layer[0].prefer("linear_test_lazy")
assert layer[0](x).unique().tolist() == [7.0] and _C.last_kernel("linear") == "linear_test_lazy"
for name, text in (("throws", "out of acme"), ("throws-a-number", "no std::exception"), ("fails", "the accelerator is on fire"), ("divides", "ZeroDivisionError")):
    with lowbit.force_kernel(f"linear_test_{name}".replace("-", "_")):
        try:
            layer[0](x)
            raise SystemExit(f"{name} did not fail")
        except RuntimeError as error:
            assert text in str(error) and f"of {name} failed" in str(error) and "linear: the row" in str(error), error
with lowbit.force_kernel("linear_int8_scalar"):
    assert layer[0](x).isfinite().all()  # the program goes on
import keeps
try:
    keeps.kept.add_kernel("linear", "linear_late", "cpu", print)
    raise SystemExit("the list is not complete")
except RuntimeError as error:
    assert "the list of backends is complete" in str(error)
try:
    rows = _C.external.Rows(); rows.add_kernel("linear", "linear_late", "cpu", print, None, False); rows.commit("late")
    raise SystemExit("the list is not complete")
except RuntimeError as error:
    assert "the list of backends is complete" in str(error)
assert _C.isa()["compiled"].count("eager") == 0
"""


def test_rows_are_chosen_explained_preferred_and_fail_with_a_text(packages: Packages, python: Callable[..., str]) -> None:
    packages.add_library("eager", "FIRST=1")
    packages.add_library("lazy")
    packages.add_library("fails", "FAIL=1")
    packages.add_library("throws", 'THROW=std::runtime_error("out of acme")', language="c++")
    packages.add_library("throws-a-number", "THROW=3", 'NAME="linear_test_throws_a_number"', language="c++")
    divides = "def divides(*, y, **others): y.fill_(1 / 0)\n"
    packages.add("divides", divides + "def register(api): api.add_kernel('linear', 'linear_test_divides', 'cpu', divides)\n")
    packages.add("keeps", "def register(api):\n    global kept\n    kept = api\n")
    out = python(CHOICE, PYTHONPATH=packages.path)
    explained, rows = out.partition("row  ")[::2]
    assert "linear_test_eager (eager)" in explained and "n must be 16, got 9" in explained
    assert rows.index("linear_test_eager (eager)") < rows.index("linear_int8_") < rows.index("linear_test_divides (divides)")
    assert rows.index("linear_test_divides") < rows.index("linear_test_fails") < rows.index("linear_test_lazy")


MANY = """
import torch, lowbit
torch.set_grad_enabled(False)
lowbit.quantize_(layer := torch.nn.Sequential(torch.nn.Linear(32, 16)), lowbit.int8_weight_only())
for row in (0, 49, 99):
    with lowbit.force_kernel(f"linear_many_{row}"):
        assert layer(torch.ones(2, 32)).unique().tolist() == [row]
"""


def test_a_package_may_add_a_hundred_rows_of_one_op(packages: Packages, python: Callable[..., str]) -> None:
    fill = "def fill(row): return lambda *, y, **others: y.fill_(row)\n"
    packages.add("many", fill + "def register(api):\n    for row in range(100): api.add_kernel('linear', f'linear_many_{row}', 'cpu', fill(row))\n")
    python(MANY, PYTHONPATH=packages.path)


def test_strict_mode_raises_what_was_caught(packages: Packages, python: Callable[..., str]) -> None:
    packages.add("raises", FAULTS["raises"])
    code = "import torch, lowbit\nfor _ in range(2):\n    try:\n        lowbit.kernels()\n    except RuntimeError as error:\n        print(error)"
    out = python(code, PYTHONPATH=packages.path, LOWBIT_STRICT="1")
    assert out.count("lowbit.backends: raises failed") == 2 and "OverflowError: no such accelerator" in out


INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests in the background
import torch, lowbit
from lowbit import _C
torch.set_grad_enabled(False)
layer = torch.nn.Linear(32, 16)
x = torch.ones(2, 32)
try:
    lowbit.kernels()
    raise SystemExit("Ctrl-C while packages are asked was lost")
except KeyboardInterrupt:
    pass
lowbit.quantize_(model := torch.nn.Sequential(layer), lowbit.int8_weight_only())
assert [package.name for package in lowbit.backends.report()] == ["a-package", "slow"]
assert all(not package.reason for package in lowbit.backends.report()), lowbit.backends.report()
for row in ("linear_a", "linear_asked"):
    with lowbit.force_kernel(row):
        try:
            model(x)
            raise SystemExit(f"Ctrl-C in {row} was lost")
        except KeyboardInterrupt:
            pass
with lowbit.force_kernel("linear_exits"):
    try:
        model(x)
    except SystemExit as error:
        assert error.code == 7
with lowbit.force_kernel("linear_int8_scalar"):
    assert model(x).isfinite().all()  # the program goes on
print("went on")
"""


def test_ctrl_c_comes_through_as_it_is(packages: Packages, python: Callable[..., str]) -> None:
    """In a row, in its question and while packages are asked; the list is then made by the next call."""
    interrupt = "import os, signal, time, sys\ndef interrupt(**given):\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(5)\n"
    rows = "    api.add_kernel('linear', 'linear_a', 'cpu', interrupt)\n    api.add_kernel('linear', 'linear_asked', 'cpu', print, refuses=interrupt)\n"
    packages.add("a-package", interrupt + "def exits(**given): sys.exit(7)\ndef register(api):\n" + rows + "    api.add_kernel('linear', 'linear_exits', 'cpu', exits)\n")
    packages.add("slow", interrupt + "asked = []\ndef register(api):\n    asked.append(1)\n    len(asked) > 1 or interrupt()\n    api.add_kernel('linear', 'linear_slow', 'cpu', print)\n")
    assert python(INTERRUPTED, PYTHONPATH=packages.path).strip() == "went on"


@pytest.mark.parametrize("allowed, asked", [("", []), ("b-package, Nobody", ["b_package"])])
def test_only_named_packages_are_asked(packages: Packages, python: Callable[..., str], allowed: str, asked: list[str]) -> None:
    for name in ("a-package", "b_package"):
        packages.add(name, "def register(api):\n    print(api.by, api.version)\n    return 'here'\n")
    out = python("import lowbit\nprint(lowbit.backends.report())", PYTHONPATH=packages.path, LOWBIT_BACKENDS=allowed)
    assert [line.split()[0] for line in out.splitlines() if line.endswith(" 1")] == asked
    if allowed:
        assert "a-package 1.0: LOWBIT_BACKENDS does not name it" in out
        assert "nobody: LOWBIT_BACKENDS names it, and it is not installed" in out
    else:
        assert "no package has an entry point" in out


FIRST_OP = """
import gc, weakref, torch, lowbit
from lowbit.backends import loading
def first_op():
    layer = torch.nn.Sequential(torch.nn.Linear(32, 16))
    lowbit.quantize_(layer, lowbit.int8_weight_only())
    x = torch.ones(2, 32)
    layer(x)
    return weakref.ref(x)
x = first_op()
gc.collect()
assert isinstance(loading.found[0].failure, OverflowError)
print(x())
"""


def test_a_failure_that_is_kept_keeps_nothing_of_the_first_op(packages: Packages, python: Callable[..., str]) -> None:
    packages.add("raises", "def register(api):\n    try:\n        1 / 0\n    except ZeroDivisionError:\n        raise OverflowError('no such accelerator')\n")
    assert python(FIRST_OP, PYTHONPATH=packages.path) == "None\n"
