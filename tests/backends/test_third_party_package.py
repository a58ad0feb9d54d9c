# SPDX-License-Identifier: Apache-2.0
"""examples/third_party_backend, built and installed as a user would, in a folder of its own; and what its test kit finds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_backend"

WRONG = """
# One row that is right, one whose results are off by a thousandth, one that takes no call of the kit.
def register(api):
    api.add_kernel("linear", "linear_right_wrong", "cpu", right, fits)
    api.add_kernel("linear", "linear_off_wrong", "cpu", off, fits)
    api.add_kernel("linear", "linear_shy_wrong", "cpu", right, lambda **call: "it is shy")
    api.add_kernel("attention_backward", "attention_backward_off_wrong", "cpu", backward)
    api.add_kernel("optim_step", "optim_step_sgd_wrong", "cpu", sgd, lambda *, rule, moments, **call: "only plain sgd" if rule != "sgd" or moments else None)

def fits(*, weight, x_format, activation, bias, mul, add, **others):
    if weight["format"] != "float32" or activation != "none" or mul is not None or add is not None:
        return "a float32 weight with nothing but a bias"

def right(*, x, weight, bias, y, **others):
    from lowbit import testing
    w = testing.decode_weight(weight["packed"], weight["n"], weight["k"], "float32", 0, "symmetric")
    y.copy_(x.double() @ w.double().T + (0 if bias is None else bias.double()))

def off(*, y, **others):
    right(y=y, **others)
    y.mul_(1.001)

def backward(*, forward, grad_out, grad_q, grad_k, grad_v, **others):
    for gradient, like in ((grad_q, "q"), (grad_k, "k"), (grad_v, "v")):
        assert gradient.shape == forward[like].shape
        gradient.zero_()

def sgd(*, tensors, lr, weight_decay, decoupled, maximize, **others):
    for each in tensors:
        p, g = each["param"], each["grad"].float() * (-1 if maximize else 1)
        decayed = p.float() * (1 - lr * weight_decay) if decoupled else p.float()
        p.copy_(decayed - lr * (g if decoupled else g + weight_decay * p.float()))
        each["step"].add_(1)
"""


def run(*command: str, cwd: Path | None = None, passes: bool = True, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode == 0) is passes, done.stdout[-6000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the example's rows are C, and there is no gcc on this machine")
def test_example_package_builds_installs_and_passes_its_tests(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source)  # setuptools builds in the source
    quiet = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "install", *quiet, "--target", str(site), str(source))
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider")
    elsewhere = shutil.move(source / "test_rows.py", tmp_path)  # not beside the source, which has no library
    passed = run(*pytest_, str(elsewhere), cwd=tmp_path, PYTHONPATH=path)
    for test in ("TestCpu::test_linear[linear_int8_example]", "TestSimulated::test_attention[attention_forward_torch_example]"):
        assert f"PASSED test_rows.py::{test}" in passed
    told = run(sys.executable, "-c", USE, PYTHONPATH=path, LOWBIT_SIM="1")
    assert "lowbit.backends  lowbit-example 0.1: added linear_int8_example, attention_forward_torch_example" in told
    assert re.search(r"attention ran attention_forward_torch_example, close True, then attention_forward_\w+_sim", told), told
    assert "linear_int8_example (lowbit-example)" in told and "the weight is not int8" in told
    measured = run(sys.executable, "-c", MEASURE, PYTHONPATH=path)
    assert re.search(r"linear_int4\w+ .*\d%", measured), measured  # of the CPU's limit: a row of another device stands first


USE = """
import torch, lowbit
from lowbit import _C
from lowbit.devices import simulated
print(lowbit.backends.report())
q, k, v = torch.randn(3, 1, 2, 40, 16, device="lowbit_sim:1")
before = simulated.launches("lowbit_sim:1")
out = lowbit.scaled_dot_product_attention(q, k, v, is_causal=True)
row = _C.last_kernel("attention_forward")
exact = torch.nn.functional.scaled_dot_product_attention(*(t.cpu().double() for t in (q, k, v)), is_causal=True)
close = torch.allclose(out.cpu().double(), exact, atol=1e-5)
lowbit.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(40, 40, device="lowbit_sim:1"))
print(f"attention ran {row}, close {close}, then {_C.last_kernel('attention_forward')}")
print(lowbit.kernels("linear"))
model = torch.nn.Sequential(torch.nn.Linear(32, 16))
lowbit.quantize_(model, lowbit.int4_weight_only())
print(dict(lowbit.explain(model)[0].others)["linear_int8_example"])
"""

MEASURE = """
import torch, lowbit
model = torch.nn.Sequential(torch.nn.Linear(32, 16))
lowbit.quantize_(model, lowbit.int4_weight_only())
with lowbit.profile() as profile:
    model(torch.randn(4, 32))
print(profile)
"""


def test_test_kit_finds_wrong_rows(tmp_path: Path) -> None:
    from packages import Packages

    packages = Packages(tmp_path)
    packages.add("wrong", WRONG)
    (tmp_path / "test_wrong.py").write_text("from lowbit.testing import backend_suite\nTestRows = backend_suite('cpu', by='wrong')\n")
    command = (sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "test_wrong.py")
    out = run(*command, cwd=tmp_path, passes=False, PYTHONPATH=packages.path)
    ended = dict(re.findall(r"^(?:PASSED|FAILED) test_wrong.py::TestRows::(test_\w+\[\w+\])()", out, re.MULTILINE))
    verdicts = {name: out.split(f" test_wrong.py::TestRows::{name}")[0].split("\n")[-1] for name in ended}
    assert verdicts.pop("test_linear[linear_right_wrong]") == "PASSED"
    assert verdicts.pop("test_optim_step[optim_step_sgd_wrong]") == "PASSED"
    assert {name: verdict for name, verdict in verdicts.items() if "names" not in name} == dict.fromkeys(
        ("test_linear[linear_off_wrong]", "test_linear[linear_shy_wrong]", "test_attention[attention_backward_off_wrong]"), "FAILED"
    )
    assert "no case reaches the row linear_shy_wrong" in out and "attention_backward_off_wrong: grad_q of" in out
