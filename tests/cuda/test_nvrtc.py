# SPDX-License-Identifier: Apache-2.0
"""Device sources by the real NVRTC, without a GPU: they compile for every generation, and nothing spills."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
MOST_REGISTERS = 128  # two CTAs of 256 threads a multiprocessor, of 65,536 registers


def nvrtc_is_there() -> bool:
    return any(list(Path(folder).glob("nvidia/*/lib/libnvrtc.so*")) for folder in sys.path)


pytestmark = pytest.mark.skipif(not nvrtc_is_there(), reason="no NVRTC on this machine (pip install nvidia-cuda-nvrtc)")
CODE = """
import json, sys
from lowbit import _C
print(json.dumps(_C.cuda.prebuild(sys.argv[1], sys.argv[2])))
"""


def prebuilt(python: Callable[..., str], architecture: str, only: str, folder: Path) -> list[dict[str, str]]:
    import json

    return json.loads(python(CODE, architecture, only, LOWBIT_CACHE_DIR=str(folder)).splitlines()[-1])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adamw8bit_compiles_for_every_generation(architecture: str, python: Callable[..., str], tmp_path: Path) -> None:
    (made,) = prebuilt(python, architecture, "optim_step of adamw with 2 moments in dynamic8", tmp_path)
    check(made)
    assert Path(made["path"]).name.startswith(architecture) and b"\x7fELF" in Path(made["path"]).read_bytes()[:32]


def test_everything_compiles_for_hopper(python: Callable[..., str], tmp_path: Path) -> None:
    made = prebuilt(python, "sm_90a", "", tmp_path)
    assert len(made) >= 21 and len({row["path"] for row in made}) == len(made)
    for row in made:
        check(row)


def check(made: dict[str, str]) -> None:
    assert not re.search(r"[1-9]\d* bytes (stack frame|spill stores|spill loads)", made["log"]), made["log"]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", made["log"])]
    assert registers and max(registers) <= MOST_REGISTERS, (made["name"], registers)
    assert "warning" not in made["log"], made["log"]


def test_an_architecture_that_is_none_is_refused_by_name(python: Callable[..., str], tmp_path: Path) -> None:
    code = "from lowbit import _C\ntry: _C.cuda.prebuild('sm_1')\nexcept RuntimeError as error: print(error)"
    assert re.search(r"NVRTC 1\d\.\d+ \(.*\) made no code for sm_1, error", python(code, LOWBIT_CACHE_DIR=str(tmp_path)))
