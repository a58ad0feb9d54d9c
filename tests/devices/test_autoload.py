# SPDX-License-Identifier: Apache-2.0
"""The entry point `torch.backends`: ops after a bare `import torch`, both orders, switched off, broken, and its cost."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable

import pytest

from lowbit import _C
from lowbit.peers import when_imported

INSTALLED = any(entry.value == "lowbit_autoload:autoload" for entry in importlib.metadata.entry_points(group="torch.backends"))
pytestmark = pytest.mark.skipif(not INSTALLED, reason="lowbit is not installed with its entry points (run from a source tree)")

HAS_OP = "print(hasattr(torch.ops.lowbit, 'linear'))"


def test_bare_import_torch_knows_the_ops(python: Callable[..., str]) -> None:
    assert python(f"import torch; {HAS_OP}").strip() == "True"


@pytest.mark.parametrize("order", ["import torch, lowbit", "import lowbit, torch"])
def test_both_import_orders_register_once(python: Callable[..., str], order: str) -> None:
    out = python(f"import warnings; warnings.simplefilter('error')\n{order}\n{HAS_OP}\nprint(lowbit.info()['autoload'])")
    assert out.split("\n")[:2] == ["True", "ran at import torch"]


def test_switch_of_torch_turns_it_off_and_import_lowbit_still_registers(python: Callable[..., str]) -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert python(f"import torch; {HAS_OP}", **off).strip() == "False"
    out = python(f"import torch, lowbit; {HAS_OP}; print(lowbit.info()['autoload'])", **off)
    assert out.split("\n")[:2] == ["True", "off: TORCH_DEVICE_BACKEND_AUTOLOAD=0"]


BREAK = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "lowbit._C" and not getattr(sys, "repaired", False):
            raise ImportError("liblowbit is broken (test)")
sys.meta_path.insert(0, Broken())
"""


def test_broken_lowbit_never_breaks_import_torch_and_the_reason_is_kept(python: Callable[..., str]) -> None:
    out = python(BREAK + "import torch; print(torch.ones(1).item())\nsys.repaired = True\nimport lowbit; print(lowbit.info()['autoload'])")
    assert out.splitlines() == ["1.0", "failed: ImportError: liblowbit is broken (test)"]


def test_strict_mode_raises(python: Callable[..., str]) -> None:
    code = BREAK + "try:\n    import torch\nexcept RuntimeError as error:\n    print(error)"
    assert "Failed to load the backend extension: lowbit" in python(code, LOWBIT_STRICT="1")


def test_strict_mode_raises_what_an_integration_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(when_imported, "failures", {})
    finder = when_imported._Finder("json", ("lowbit.peers.no_such",))
    assert finder.joined() and "lowbit.peers.no_such" in when_imported.failures
    monkeypatch.setenv("LOWBIT_STRICT", "1")
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        finder.joined()


def test_it_claims_no_device(python: Callable[..., str]) -> None:
    code = "import torch; print(torch._C._get_privateuse1_backend_name(), torch.get_default_device())"
    assert python(code).split() == ["privateuseone", "cpu"]


def test_it_imports_nothing_but_its_own_few_modules(python: Callable[..., str]) -> None:
    code = "import sys, torch; print(*sorted(sys.modules))"
    loaded = set(python(code).split()) - set(python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split())
    ours = {"lowbit_autoload", "lowbit", "lowbit._C", "lowbit.ops"}
    ours |= {f"lowbit.ops.{name}" for name in ("registration", "derivatives", "fakes", "autocast", "attention_fakes", "forward_mode")}
    ours |= {"lowbit.peers", "lowbit.peers.when_imported"}
    standard = set(sys.stdlib_module_names)
    others = {name for name in loaded - ours if name.partition(".")[0] not in standard}
    assert {name for name in others if not name.startswith("lowbit._C.")} == set()  # submodules: no file of their own


NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
"""


@pytest.mark.parametrize("code", ["from lowbit import quantize_", "import lowbit; lowbit.optim", "import lowbit; lowbit.info()"])
def test_missing_torch_is_explained_by_every_public_name(python: Callable[..., str], code: str) -> None:
    explained = f"{NO_TORCH}\ntry:\n    {code}\nexcept ImportError as error:\n    print(error)"
    assert 'pip install "lowbit[torch]"' in python(explained)


def test_a_free_threaded_python_is_refused_in_a_sentence(python: Callable[..., str]) -> None:
    code = "import sys; sys.abiflags = 't'\ntry:\n    import lowbit\nexcept ImportError as error:\n    print(error)"
    assert "lowbit needs a Python with the GIL, got a free-threaded Python 3." in python(code)


def test_the_compiled_part_works_without_torch(python: Callable[..., str]) -> None:
    code = f"{NO_TORCH}\nimport lowbit._C\nimport lowbit\nprint(lowbit._C.isa()['detected'], lowbit.__version__, hasattr(lowbit, 'nothing'))"
    assert python(code).split() == [_C.isa()["detected"], _C.version, "False"]


def test_the_command_line_explains_a_missing_torch() -> None:
    code = f"{NO_TORCH}\nfrom lowbit.__main__ import main\nraise SystemExit(main(['info']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and 'pip install "lowbit[torch]"' in done.stderr and "Traceback" not in done.stderr
