# SPDX-License-Identifier: Apache-2.0
"""The instructions of cuda/device/mma.cuh: what the emulation makes of them, against torch, and against silicon where there is some."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
BODY = """
using namespace lowbit::cuda;
LOWBIT_INLINE void primitives(const uint32_t* in, uint32_t* out) {
  in += threadIdx.x * 10, out += threadIdx.x * 10;
  const uint32_t a[4] = {in[0], in[1], in[2], in[3]}, b[2] = {in[4], in[5]};
  float f[4];
  int32_t i[4];
  for (int k = 0; k < 4; k++) f[k] = __uint_as_float(in[6 + k]), i[k] = static_cast<int32_t>(in[6 + k]);
  multiply_bf16(f, a, b), multiply_u8s8(i, a, b);
  for (int k = 0; k < 4; k++) out[k] = __float_as_uint(f[k]), out[4 + k] = static_cast<uint32_t>(i[k]);
  out[8] = fma_bf16x2(0x43004300u | (in[0] & 0x7f007fu), 0x3f803f80u, 0xc308c308u);
  out[9] = __float_as_uint(float_of_half(in[1]));
}
"""
ON_HOST = BODY + """
struct Args { const uint32_t* in; uint32_t* out; };
LOWBIT_KERNEL(kernel, 32, Args) { primitives(args.in, args.out); }
extern "C" bool run(const uint32_t* in, uint32_t* out) {
  const Args args{in, out};
  return lowbit_run_grid(reinterpret_cast<void (*)(const void*)>(kernel), &args, 1, 32, 0);
}
"""
ON_GPU = BODY + 'extern "C" __global__ void kernel(const unsigned* in, unsigned* out) { primitives(in, out); }'


def words() -> torch.Tensor:
    """For each lane a[4], b[2], c[4]: pairs of bfloat16 that are small whole numbers, so that sums are exact; as bytes they are any."""
    random = torch.Generator().manual_seed(0)
    pairs = torch.randint(-128, 128, (32, 20), generator=random).float()
    bits = pairs.bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF
    words = bits[:, ::2] | bits[:, 1::2] << 16
    words[:, 6:] = torch.randint(-128, 128, (32, 4), generator=random).float().view(torch.int32)
    return words


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine")
    folder = tmp_path_factory.mktemp("primitives")
    (folder / "kernel.cpp").write_text('#include "core/bits.hpp"\n' + ON_HOST)
    command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-include", str(HERE / "cuda_on_host.hpp"), f"-I{CSRC}"]
    subprocess.run([*command, str(folder / "kernel.cpp"), "-o", str(folder / "kernel.so")], check=True)
    given, out = words().numpy(), numpy.zeros((32, 10), numpy.int32)
    assert ctypes.CDLL(str(folder / "kernel.so")).run(given.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p))
    return torch.from_numpy(out)


def bytes_of(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return words.contiguous().view(torch.uint8).view(dtype).double()


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """a [16, k] and b [k, 8] as PTX deals them out to lanes: word w of lane (g, t) is of row g + 8 (w % 2)."""
    given = words()
    second = torch.int8 if dtype is torch.uint8 else dtype
    each = 4 // torch.empty(0, dtype=dtype).element_size()
    a, b = torch.zeros(16, 8 * each, dtype=torch.double), torch.zeros(8 * each, 8, dtype=torch.double)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for half in range(2):
            k = slice((half * 4 + t) * each, (half * 4 + t + 1) * each)
            for lower in range(2):
                a[g + 8 * lower, k] = bytes_of(given[lane, 2 * half + lower : 2 * half + lower + 1], dtype)
            b[k, g] = bytes_of(given[lane, 4 + half : 5 + half], second)
    return a, b


def products(dtype: torch.dtype, c: torch.Tensor) -> torch.Tensor:
    """c + a @ b, by lane."""
    a, b = matrices(dtype)
    whole = a @ b
    lanes = [[whole[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)] for g in range(8) for t in range(4)]
    return torch.tensor(lanes, dtype=torch.double) + c


def test_products_are_those_of_the_matrices(emulated: torch.Tensor) -> None:
    c = words()[:, 6:]
    assert torch.equal(emulated[:, :4].contiguous().view(torch.float32).double(), products(torch.bfloat16, c.contiguous().view(torch.float32).double()))
    assert torch.equal(emulated[:, 4:8].to(torch.int64), (products(torch.uint8, c.double()).to(torch.int64) + 2**31) % 2**32 - 2**31)


def test_conversions(emulated: torch.Tensor) -> None:
    halves = torch.stack([words()[:, 0] & 0x7F, words()[:, 0] >> 16 & 0x7F], 1)
    assert torch.equal(emulated[:, 8:9].contiguous().view(torch.bfloat16).int(), halves - 8)
    lower = words()[:, 1].to(torch.int64).remainder(2**16)
    wanted = torch.where(lower < 2**15, lower, lower - 2**16).to(torch.int16).view(torch.float16).float()
    assert torch.equal(emulated[:, 9].contiguous().view(torch.float32), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_silicon_gives_the_bits_of_the_emulation(emulated: torch.Tensor) -> None:
    headers = [(CSRC / name).read_text() for name in ("cuda/device/std.cuh", "core/bits.hpp", "cuda/device/mma.cuh")]
    text = "".join(line for header in headers for line in header.splitlines(keepends=True) if not line.startswith(("#include", "#pragma once")))
    kernel = torch.cuda._compile_kernel(text + ON_GPU, "kernel", nvcc_options=["-std=c++20", "-default-device"])
    given = words().cuda()
    out = torch.zeros(32, 10, dtype=torch.int32, device="cuda")
    kernel((1, 1, 1), (32, 1, 1), (given, out))
    assert torch.equal(out.cpu(), emulated)
