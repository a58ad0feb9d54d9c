# SPDX-License-Identifier: Apache-2.0
"""Fixtures: `kernel` walks every row of the op `linear`; the seed; `python` runs a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

# Threads that wait sleep: where xdist's workers share the cores, those of gomp that spin took 157 of 224 CPU seconds
# from the others (975 tests of four files: 157 s, and 70 s so). Before torch, whose gomp reads it once; child processes inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest  # noqa: E402
import torch  # noqa: E402
import warm  # noqa: E402
from gated_mlp import GatedMLP  # noqa: E402
from row_fixture import fixture_of  # noqa: E402
from torch import nn  # noqa: E402

import lowbit  # noqa: E402
from lowbit import testing  # noqa: E402

pytest_plugins = ["share", "skips", "nested"]

if DEVICE := os.environ.get("LOWBIT_TEST_DEVICE"):
    import on_device

    if DEVICE.startswith("lowbit_sim"):
        from lowbit.devices import simulated

        simulated.enable()
    elif DEVICE.startswith("lowbit_ze"):
        from lowbit.devices import level_zero

        level_zero.enable()
    on_device.use(DEVICE)

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"rows that ran on {DEVICE}: {' '.join(sorted(on_device.ran))}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need arrays of the host, or the kernels of torch's CPU key, are not for another device."""
    items[:] = [item for item in items if not DEVICE or not {item.path.stem, getattr(item, "originalname", None)} & on_device.OF_THE_CPU]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


kernel = fixture_of(testing.rows("linear"))


@pytest.fixture
def served(kernel: str) -> Callable[[Iterable[testing.LinearCase]], list[testing.LinearCase]]:
    """The cases that the row takes; where it takes none there is nothing to test, which is a skip."""

    def of(cases: Iterable[testing.LinearCase]) -> list[testing.LinearCase]:
        taken = [case for case in cases if testing.serves(kernel, case)]
        if not taken:
            pytest.skip(f"{kernel} takes none of these calls")
        return taken

    return of


@pytest.fixture
def gated_mlp() -> nn.ModuleDict:
    """A model of one gated MLP, ``mlp``, of 64 features."""
    return nn.ModuleDict({"mlp": GatedMLP()}).eval()


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """PYTHONPATH of a process that finds lowbit's entry points as pip installs them, also those of a source tree."""
    folder = tmp_path / "lowbit-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lowbit\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\nlowbit = lowbit_autoload:autoload\n")
    return os.pathsep.join([str(tmp_path), str(Path(lowbit.__path__[0]).parent)])


@pytest.fixture(scope="session")
def recorder_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The recorder of this process records; it cannot be turned off, so it is on for the tests that follow too."""
    if not lowbit.recorder.path():  # with LOWBIT_RECORD=1 in the environment it has one
        lowbit.recorder.start(folder=tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def python() -> Callable[..., str]:
    """Run code in a fresh interpreter, with extra environment variables; returns its stdout, fails if it fails."""

    def run(code: str, *arguments: str, **environment: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600, check=False)
        return said_by(done)

    return run


@pytest.fixture
def python_after_torch() -> Callable[..., str]:
    """The same in a process that has imported torch already, which is faster (tests/warm.py)."""
    return lambda code, *arguments, **environment: said_by(warm.run("-c", code, *arguments, **environment))


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
