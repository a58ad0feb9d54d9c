# SPDX-License-Identifier: Apache-2.0
"""Device sources by the real NVRTC, without a GPU: they compile for every generation, and nothing spills."""

from __future__ import annotations

import functools
import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
MOST_REGISTERS = 128  # two CTAs of 256 threads a multiprocessor, of 65,536 registers
MOST_OF_ATTENTION = 255  # of 128 threads, as those of decode and of tiles


def nvrtc_is_there() -> bool:
    return any(list(Path(folder).glob("nvidia/*/lib/libnvrtc.so*")) for folder in sys.path)


pytestmark = pytest.mark.skipif(not nvrtc_is_there(), reason="no NVRTC on this machine (pip install nvidia-cuda-nvrtc)")
CODE = """
import json, sys
from tests import internals
architecture, every_linear, *names = sys.argv[1:]
print(json.dumps([made for name in names for made in internals.prebuild(architecture, name, every_linear == "1")]))
"""
# The kernels of each kind of linear that take most registers.
HEAVIEST = (
    "linear of float32, 0 scales a tile, activations in 3 parts, 16 rows",
    "linear of float16, 0 scales a tile, activations in 2 parts, 16 rows",
    "linear of nf4, 2 scales a tile, activations in 3 parts, 8 rows",
    "linear of fp4_e2m1, 4 scales a tile, activations in 1 parts, 32 rows",
    "linear of int7 with zero points, 2 scales a tile, activations in 3 parts, 16 rows",
    "linear of int4 with zero points, 2 scales a tile, int8 activations, 16 rows",
    "linear of int2 with zero points, 2 scales a tile, int8 activations, 16 rows",
    "linear of many rows of int7, int8 activations",
    "linear in splits of float32",
    "linear by tiles of int8 with zero points, 2 scales a tile, int8 activations, 64 rows",
    "linear by tiles of int7, 1 scales a tile, int8 activations, 64 rows",
    "linear by tiles of int4, 0 scales a tile, int8 activations, 64 rows",
    "products of experts, linear of float32, 0 scales a tile, activations in 3 parts, 16 rows",
    "products of experts, linear of int7 with zero points, 2 scales a tile, activations in 3 parts, 16 rows",
    "products of experts, linear of int4 with zero points, 2 scales a tile, int8 activations, 16 rows",
    "results of experts of float32",
)


# Products of warpgroups that take most registers; those of int4 and of codes are among the common sources.
BY_WARPGROUPS = (
    "linear by warpgroups of float16, 0 scales a tile, bfloat16 activations, 128 rows",
    "linear by warpgroups of nf4, 2 scales a tile, bfloat16 activations, 256 rows",
    "linear by warpgroups of fp4_e2m1, 4 scales a tile, bfloat16 activations, 128 rows",
    "linear by warpgroups of int7 with zero points, 2 scales a tile, bfloat16 activations, 128 rows",
    "linear by warpgroups of int7 with zero points, 2 scales a tile, float16 activations, 256 rows",
)


def prebuilt(python_after_torch: Callable[..., str], architecture: str, *names: str, folder: Path, every_linear: bool = False) -> list[dict[str, str]]:
    made = python_after_torch(CODE, architecture, str(int(every_linear)), *names, LOWBIT_CACHE_DIR=str(folder))
    return json.loads(made.splitlines()[-1])


def check(made: dict[str, str]) -> None:
    assert not re.search(r"[1-9]\d* bytes (stack frame|spill stores|spill loads)", made["log"]), made["name"] + made["log"]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", made["log"])]
    few_threads = any(word in made["name"] for word in ("attention", "captured", "decode of", "by tiles", "256 rows"))
    most = MOST_OF_ATTENTION if few_threads else MOST_REGISTERS
    assert registers and max(registers) <= most, (made["name"], registers)
    assert "warning" not in made["log"], made["log"]
    if NVDISASM and BEGINS_EARLY.match(made["name"]) and not Path(made["path"]).name.startswith("sm_8"):
        assert not before_it_waits(disassembled(made["path"])), made["name"]


OF_ATTENTION = """
import json, sys
import torch
from tests import internals
from lowbit.score.program_cache import bind
bias, document = torch.zeros(8, 512), torch.zeros(512, dtype=torch.int64)
score = bind("test", lambda s, b, h, q, k: 20 * torch.tanh((s + bias[h, (q - k).abs()]) / 20), mask=False)
mask = bind("test", lambda b, h, q, k: (q >= k) & (document[q] == document[k]), mask=True)
architecture, e, wanted = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
mods = (score.code, score.captured, mask.code, mask.captured) if wanted else ()
if len(sys.argv) > 4:
    made = [internals.prebuild_decode(architecture, cache, e, e, rows, *mods) for cache, rows in (("int8", 8), ("bfloat16", 16))]
else:
    made = internals.prebuild_attention(architecture, "bfloat16", e, e, *mods)
print(json.dumps(made))
"""


@pytest.mark.parametrize("architecture, e, mods", [("sm_80", 128, True), ("sm_86", 64, False), ("sm_89", 64, False), ("sm_90a", 128, False), ("sm_90a", 128, True),
                                                    ("sm_100a", 64, False), ("sm_120a", 64, True)])  # fmt: skip
def test_attention_does_not_spill(architecture: str, e: int, mods: bool, python_after_torch: Callable[..., str], tmp_path: Path, **environment: str) -> None:
    made = json.loads(python_after_torch(OF_ATTENTION, architecture, str(e), str(int(mods)), LOWBIT_CACHE_DIR=str(tmp_path), **environment).splitlines()[-1])
    # Forward, backward, with a score_mod what it captures; for Hopper both and prompts by warpgroups, but no backward of a score_mod that gathers.
    assert len(made) == (3 if mods else 2) + (0 if architecture != "sm_90a" else 2 if mods else 3)
    for row in made:
        check(row)
        if NVDISASM and "by warpgroups" in row["name"]:
            check_warpgroups(row)


@pytest.mark.skipif("LOWBIT_TEST_NVRTC" not in os.environ, reason="no second NVRTC (tools/test_env)")
@pytest.mark.parametrize("mods", [False, True])
def test_attention_does_not_spill_by_the_nvrtc_of_torch_2_11(mods: bool, python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    """It hoists loads that the newest leaves where they are: 64 to 100 bytes of head dim 128 spilled."""
    test_attention_does_not_spill("sm_90a", 128, mods, python_after_torch, tmp_path, LOWBIT_CUDA_PATH=os.environ["LOWBIT_TEST_NVRTC"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_and_a_product_compile_for_every_generation(architecture: str, python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    names = "optim_step of adamw with 2 moments in dynamic8", "linear of int4, 1 scales a tile, activations in place, 1 row"
    made = prebuilt(python_after_torch, architecture, *names, folder=tmp_path)
    dtypes = [f", blocks of 256, parameters in {dtype}, gradients in {dtype}" for dtype in ("float32", "bfloat16")]
    assert [row["name"] for row in made] == [*(names[0] + dtype for dtype in dtypes), names[1]]
    for row in made:
        check(row)
        assert Path(row["path"]).name.startswith(architecture) and b"\x7fELF" in Path(row["path"]).read_bytes()[:64]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_120a"])
def test_decode_does_not_spill(architecture: str, python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    made = prebuilt(python_after_torch, architecture, "decode of int4", folder=tmp_path)
    assert len(made) == 2  # 8 rows and 16
    for row in made:
        check(row)


def test_decode_with_mods_does_not_spill(python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    made = json.loads(python_after_torch(OF_ATTENTION, "sm_90a", "128", "1", "decode", LOWBIT_CACHE_DIR=str(tmp_path)).splitlines()[-1])
    assert [row["name"].endswith(" rows, a score_mod, a mask_mod") for row in made] == [True, True]
    for row in made:
        check(row)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_the_heaviest_products_do_not_spill(architecture: str, python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    made = prebuilt(python_after_torch, architecture, *HEAVIEST, folder=tmp_path, every_linear=True)
    assert [row["name"] for row in made] == list(HEAVIEST)
    for row in made:
        check(row)


NVDISASM = next((path for folder in sys.path for path in Path(folder).glob("nvidia/*/bin/nvdisasm")), None)


@pytest.mark.skipif(NVDISASM is None, reason="no nvdisasm on this machine (pip install nvidia-cuda-nvdisasm)")
def test_no_register_is_written_while_a_product_of_warpgroups_reads_it(python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    """ptxas (13.0, 13.5) gives registers of a first factor away too early if a load has filled them, which PTX does not show."""
    made = prebuilt(python_after_torch, "sm_90a", *BY_WARPGROUPS, folder=tmp_path, every_linear=True)
    assert [row["name"] for row in made] == list(BY_WARPGROUPS)
    for row in made:
        check(row), check_warpgroups(row)


def check_warpgroups(made: dict[str, str]) -> None:
    assert "serialized" not in made["log"], made["name"] + made["log"]
    assert not writes_to_factors(disassembled(made["path"])), made["name"]


@functools.lru_cache(maxsize=1)  # of a product of warpgroups, two searches in turn
def disassembled(path: str) -> str:
    kept, image = Path(path).read_bytes(), Path(path).with_suffix(".elf")
    image.write_bytes(kept[kept.index(b"\x7fELF") :])
    return subprocess.run([str(NVDISASM), "-c", str(image)], capture_output=True, text=True, check=True).stdout


class Sass:
    """The instructions of a kernel, and where each may go on."""

    def __init__(self, text: str) -> None:
        self.instructions: list[str] = []
        self.labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                self.labels[label[1]] = len(self.instructions)
            elif instruction := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", line):
                self.instructions.append(instruction[1])

    def after(self, at: int) -> list[int]:
        text = self.instructions[at]
        branches = re.findall(r"BRA (?:\S+, )?`\((\.L_x_\d+)\)", text)
        ends = text.startswith(("EXIT", "BRA `")) or at + 1 == len(self.instructions)
        return [self.labels[label] for label in branches] + [at + 1] * (not ends)


def writes_to_factors(sass: str) -> set[tuple[int, str]]:
    """Products, and writes to registers of their first factors on any path before a wait says that they are done."""
    kernel = Sass(sass)
    instructions = kernel.instructions
    products = {i: int(found[1]) for i, text in enumerate(instructions) if (found := re.search(r"GMMA\S* R\d+, R(\d+)", text))}
    assert len(products) >= 2, sass[:1000]
    written = set()
    for product, first in products.items():
        paths, seen = [(product + 1, 0)], set()
        while paths:
            at, later = paths.pop()  # later: products that were asked for since
            if (at, later) in seen:
                continue
            seen.add((at, later))
            text = instructions[at]
            later = min(later + (at in products), 8)  # more are never on their way
            wait = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", text)
            if wait and int(wait[1]) <= later:
                continue
            target = re.match(r"(?:@!?U?P\w+ )?(\S+) (?:P\w+, )?R(\d+)", text)
            if target and not target[1].startswith(("ST", "LDGSTS", "RED", "HGMMA", "IGMMA")):
                wide = 4 if ".128" in target[1] else 2 if ".64" in target[1] or "WIDE" in target[1] else 1
                if set(range(int(target[2]), int(target[2]) + wide)) & set(range(first, first + 4)):
                    written.add((product, text))
                    continue
            paths += [(to, later) for to in kernel.after(at)]
    return written


def test_the_search_finds_writes_to_factors() -> None:
    product, wait = "/*0010*/ IGMMA.64x128x32.U8.S8 R24, R88, gdesc[UR4], R24, gsb0 ;\n", "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    loop = ".L_x_1:\n/*0000*/ {} ;\n" + product + product + "{}/*0040*/ @!P0 BRA `(.L_x_1) ;\n" + wait + "/*0050*/ EXIT ;\n"
    assert len(writes_to_factors(loop.format("LDS.64 R90, [R8]", ""))) == 2
    assert not writes_to_factors(loop.format("LDS.64 R90, [R8]", wait)) and not writes_to_factors(loop.format("LDS.64 R92, [R8]", ""))


BEGINS_EARLY = re.compile(r"(int8 )?activations |linear (of (?!many rows)|in splits of |by warpgroups of )|(pairs|products|results) of experts")


def before_it_waits(sass: str) -> set[str]:
    """A kernel that begins early may not come to these, memory and its end, before it has waited for other kernels (ACQBULK).

    It may ask L2 for what it will read (UBLKPF), read constants of its own, and divide."""
    kernel = Sass(sass)
    paths, seen, found = [0], set(), set()
    while paths:
        at = paths.pop()
        text = re.sub(r"^@!?U?P\w+ ", "", kernel.instructions[at])
        if at in seen or text.startswith("ACQBULK"):
            continue
        seen.add(at)
        if re.match(r"LDG(?!\S*CONSTANT)|LDGSTS|STG|(LD|ST)[. ]|ATOM|RED|UBLKCP|UBLKRED|UTMA|CALL(?!.*__cuda_sm20_div)|EXIT", text):
            found.add(text)
        paths += kernel.after(at)
    return found


def test_the_search_finds_what_comes_before_a_wait() -> None:
    kernel = "/*0000*/ PREEXIT ;\n{}/*0020*/ {} ;\n/*0030*/ ACQBULK ;\n{}.L_x_1:\n/*0050*/ EXIT ;\n"
    load, over, ahead = "/*0010*/ @!P1 LDG.E R2, desc[UR4][R4.64] ;\n", "@P0 BRA `(.L_x_1)", "UBLKPF.L2 [UR6], UR4"
    assert before_it_waits(kernel.format(load, over, "")) == {"LDG.E R2, desc[UR4][R4.64] ", "EXIT "}
    assert before_it_waits(kernel.format(load, ahead, load)) and not before_it_waits(kernel.format("", ahead, load))


PARTS = {"optim_step": "o", "linear": "l", "attention and decode": "ad"}  # by the first letters of their names: 15 to 30 s of NVRTC each
PARTS["others"] = "".join(sorted(set(string.ascii_letters + string.digits).difference(*PARTS.values())))


@pytest.mark.parametrize("part", PARTS)
def test_everything_compiles_for_hopper(part: str, python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    made = prebuilt(python_after_torch, "sm_90a", *PARTS[part], folder=tmp_path)
    assert len(made) >= 15 and len({row["path"] for row in made}) == len(made)
    for row in made:
        check(row)
        if NVDISASM and "by warpgroups" in row["name"]:
            check_warpgroups(row)


def test_an_architecture_of_the_future_gets_ptx(python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    (made,) = prebuilt(python_after_torch, "sm_900a", "conversion of signed float8", folder=tmp_path)
    text = Path(made["path"]).read_bytes()
    assert Path(made["path"]).name.startswith("sm_900a") and re.search(rb"\.target sm_1[2-9]\d", text) and b"encode_state" in text


def test_an_architecture_that_is_none_is_refused_by_name(python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    code = "from lowbit import _C\ntry: _C.cuda.prebuild('sm_1')\nexcept RuntimeError as error: print(error)"
    assert re.search(r"NVRTC 1\d\.\d+ \(.*\) made no code for sm_1, error", python_after_torch(code, LOWBIT_CACHE_DIR=str(tmp_path)))
