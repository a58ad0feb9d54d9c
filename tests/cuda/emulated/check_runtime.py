# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime on the emulated GPU: what is loaded, compiled, launched, kept; every failure in words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from settings import forced
from tests import internals

import lowbit
from lowbit import _C
from lowbit.devices import simulated

simulated.enable()
DEVICE = "lowbit_sim:1"


LINE = torch.linspace(-1, 1, 100)


def encode(block_size: int, backend: str = "cuda_sim", format: str = "float8", signed: bool = True, values: torch.Tensor = LINE) -> torch.Tensor:
    """A call whose program is one for each block size, and so not yet loaded at the first."""
    codes = torch.zeros(len(values), dtype=torch.uint8, device=DEVICE)
    scale = torch.zeros(-(-len(values) // block_size), device=DEVICE)
    with forced(f"encode_state_{format}_{backend}"):
        _C.encode_state(values.to(DEVICE), _C.STATE_FORMATS[format], signed, block_size, codes, scale)
    return codes.cpu()


def cubins() -> list[Path]:
    return sorted(Path(os.environ["LOWBIT_CACHE_DIR"], "cuda").glob("*.cubin"))


def test_a_compilation_is_told_kept_and_loaded_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(tmp_path / "log"))
    before = set(cubins())
    first = encode(64)
    (made,) = set(cubins()) - before
    told = capfd.readouterr().err
    assert told.startswith("lowbit: compiled conversion of signed float8, blocks of 64 for sm_90a in ") and str(made) in told
    assert torch.equal(encode(64), first) and capfd.readouterr().err == ""
    lines = (tmp_path / "log").read_text().split("\n")
    assert sum(line.startswith("load") for line in lines) == 1
    assert [line for line in lines if line.startswith("launch")] == ["launch encode_state 1 256 0"] * 2
    assert not list(made.parent.glob("*.cubin.*"))  # nothing is left aside


def test_a_kept_file_that_is_no_code_is_made_anew(capfd: pytest.CaptureFixture[str]) -> None:
    before = set(cubins())
    made = internals.prebuild("sm_90a", "conversion of unsigned float8")[0]["path"]
    assert set(cubins()) - before == {Path(made)}
    right = Path(made).read_bytes()
    Path(made).write_bytes(b"lowbit code 2\n" + b"no code")
    capfd.readouterr()
    codes = encode(256, signed=False, values=torch.ones(8))
    assert "compiled conversion of unsigned float8" in capfd.readouterr().err
    assert len(Path(made).read_bytes()) == len(right) and codes.tolist() == [0x7E] * 8


def test_code_that_came_with_the_package_is_found_first(capfd: pytest.CaptureFixture[str]) -> None:
    made = Path(internals.prebuild("sm_90a", "conversion of signed dynamic8")[0]["path"])
    pack = Path(_C.__file__).with_name("cubins")
    pack.mkdir(exist_ok=True)
    try:
        made.rename(pack / made.name)
        capfd.readouterr()
        codes = encode(256, format="dynamic8", values=torch.ones(8))
        assert capfd.readouterr().err == "" and not made.exists() and codes.any()
    finally:
        (pack / made.name).unlink()
        if not any(pack.iterdir()):
            pack.rmdir()


@pytest.mark.parametrize(
    "fail, words",
    [
        ("cuLaunchKernelEx:719", r"lowbit_sim:1: encode_state of conversion of signed float8, blocks of 256, 1 CTAs of 256 threads failed: "
                               r"CUDA_ERROR_LAUNCH_FAILED \(719\): as the emulation was told"),
        ("cuLibraryLoadData:2", r"lowbit_sim:1: loading conversion of signed float8, blocks of 512 for sm_90a, which NVRTC 13.0 \(.*\) made, by a driver of CUDA 13.0 failed: CUDA_ERROR_OUT_OF_MEMORY"),
        ("nvrtcCompileProgram:6", r"blocks of 1024: NVRTC 13.0 \(.*libcuda.so.1\) made no code for sm_90a, error 6"),
    ],
)  # fmt: skip
def test_a_failure_names_kernel_grid_and_device(fail: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_size = {"cuLaunchKernelEx": 256, "cuLibraryLoadData": 512, "nvrtcCompileProgram": 1024}[fail.partition(":")[0]]
    monkeypatch.setenv("LOWBIT_EMULATED_FAIL", fail)
    with pytest.raises(RuntimeError, match=words):
        encode(block_size)
    monkeypatch.delenv("LOWBIT_EMULATED_FAIL")
    right = encode(block_size)  # the process goes on, and so does the CPU
    assert torch.equal(right, encode(block_size, "scalar_sim"))


def test_a_capture_takes_what_is_loaded_and_refuses_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    encode(64)
    monkeypatch.setenv("LOWBIT_EMULATED_CAPTURING", "1")
    encode(64)
    with pytest.raises(RuntimeError, match="blocks of 2048 is not loaded yet, .* captured in a CUDA graph: call the same once before"):
        encode(2048)


def test_without_jit_only_what_is_kept_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    encode(64)
    monkeypatch.setenv("LOWBIT_JIT", "0")
    encode(64)
    with pytest.raises(RuntimeError, match=r"no code of .*blocks of 4096 for sm_90a \(.*\), and LOWBIT_JIT=0 .*lowbit prebuild --arch sm_90a"):
        encode(4096)


def test_a_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "file"))
    encode(32)
    assert "not kept: cannot write" in capfd.readouterr().err


def test_info_says_what_was_found_and_what_not() -> None:
    info, folder = lowbit.info(), os.environ["LOWBIT_CUDA_PATH"]
    assert info["cuda driver"] == info["cuda nvrtc"] == f"{folder}/libcuda.so.1"
    served = info["cuda:0"].removeprefix("runs ").split(", ")
    assert {"linear", "quantize", "optim_step", "attention_backward", "decode", "kv_quantize"} <= set(served) <= set(_C.OPS)
    assert "blocks_linear" not in served, "bitsandbytes' weights have rows on the CPU alone"
    for library in _C.cuda.libraries():
        assert library["path"] or f"was not found in {folder}, " in library["missing"], library
