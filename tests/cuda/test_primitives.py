# SPDX-License-Identifier: Apache-2.0
"""The instructions of cuda/device/mma.cuh and tiles.cuh: what the emulation makes of them, against torch, and against silicon where there is some."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
BODY = """
using namespace lowbit::cuda;
LOWBIT_INLINE void primitives(const uint32_t* in, uint32_t* out) {
  in += threadIdx.x * 10, out += threadIdx.x * 15;
  const uint32_t a[4] = {in[0], in[1], in[2], in[3]}, b[2] = {in[4], in[5]};
  float f[4];
  int32_t i[4], j[4];
  for (int k = 0; k < 4; k++) f[k] = __uint_as_float(in[6 + k]), i[k] = j[k] = static_cast<int32_t>(in[6 + k]);
  multiply_bf16(f, a, b), multiply_u8s8(i, a, b), multiply_s8s8(j, a, b);
  for (int k = 0; k < 4; k++) out[k] = __float_as_uint(f[k]), out[4 + k] = static_cast<uint32_t>(i[k]);
  for (int k = 0; k < 4; k++) out[10 + k] = static_cast<uint32_t>(j[k]);
  out[8] = fma_bf16x2(0x43004300u | (in[0] & 0x7f007fu), 0x3f803f80u, 0xc308c308u);
  out[9] = __float_as_uint(float_of_half(in[1]));
  out[14] = fma_bf16x2(in[2] & 0x87f087f0u, 0x7b807b80u, 0x80008000u);  // float8_e4m3 times 2^120
}
// in: 32 rows of 16 bytes, four matrices; then a[4], b[2] of float16 and two floats per lane.
LOWBIT_INLINE void tiles(const uint32_t* in, uint32_t* out) {
  LOWBIT_SHARED(uint16_t, rows, [64][8]);
  const uint32_t *given = in + 128 + threadIdx.x * 8, lane = threadIdx.x;
  copy_async(rows[lane], reinterpret_cast<const uint16_t*>(in + lane * 4), true);
  copy_async(rows[32 + lane], reinterpret_cast<const uint16_t*>(in), false);
  wait_for_copies();
  __syncthreads();
  uint32_t straight[4], transposed[4], nothing[4];
  load_matrices(straight, rows[lane]), load_transposed(transposed, rows[lane]), load_matrices(nothing, rows[32 + lane]);
  const uint32_t a[4] = {given[0], given[1], given[2], given[3]}, b[2] = {given[4], given[5]};
  float c[4] = {1, 2, 3, 4};
  multiply_f16(c, a, b);
  const float low = __uint_as_float(given[6]), high = __uint_as_float(given[7]);
  out += lane * 16;
  for (int i = 0; i < 4; i++) out[i] = straight[i], out[4 + i] = transposed[i], out[8 + i] = __float_as_uint(c[i]);
  out[12] = pair_of_bf16(low, high), out[13] = pair_of_f16(low, high);
  out[14] = __float_as_uint(power_of_2(low)), out[15] = nothing[0] | nothing[1] | nothing[2] | nothing[3];
}
"""
ON_HOST = BODY + """
struct Args { const uint32_t* in; uint32_t* out; };
LOWBIT_KERNEL(kernel, 32, Args) { primitives(args.in, args.out); }
LOWBIT_KERNEL(tile_kernel, 32, Args) { tiles(args.in, args.out); }
extern "C" bool run(const uint32_t* in, uint32_t* out, bool of_tiles) {
  const Args args{in, out};
  return lowbit_run_grid(reinterpret_cast<void (*)(const void*)>(of_tiles ? tile_kernel : kernel), &args, 1, 32, 0, 0, false);
}
"""
OUT_OF_BOUNDS = """
struct Args { int place, dynamic; };
LOWBIT_KERNEL(kernel, 32, Args) {
  LOWBIT_SHARED(int, sums, [8]);
  LOWBIT_DYNAMIC_SHARED(int[16], words);
  if (threadIdx.x == 0) (args.dynamic ? words : sums)[args.place] = 1;
}
extern "C" bool run(int place, int dynamic, unsigned bytes) {
  const Args args{place, dynamic};
  return lowbit_run_grid(reinterpret_cast<void (*)(const void*)>(kernel), &args, 1, 32, bytes, 0, false);
}
"""
ON_GPU = BODY + """
extern "C" __global__ void kernel(const unsigned* in, unsigned* out) { primitives(in, out); }
extern "C" __global__ void tile_kernel(const unsigned* in, unsigned* out) { tiles(in, out); }
"""


def words() -> torch.Tensor:
    """For each lane a[4], b[2], c[4]: pairs of bfloat16 that are small whole numbers, so that sums are exact; as bytes they are any."""
    random = torch.Generator().manual_seed(0)
    pairs = torch.randint(-128, 128, (32, 20), generator=random).float()
    bits = pairs.bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF
    words = bits[:, ::2] | bits[:, 1::2] << 16
    words[:, 6:] = torch.randint(-128, 128, (32, 4), generator=random).float().view(torch.int32)
    return words


def extreme_words() -> torch.Tensor:
    """As `words`: bfloat16 below the smallest normal number times 2^120, whose sums are exact; a row with inf, one with nan."""
    random = torch.Generator().manual_seed(2)
    pairs = torch.randint(1, 128, (32, 20), generator=random).int() | torch.randint(0, 2, (32, 20), generator=random).int() << 15
    pairs[:, 8:12] = pairs[:, 8:12] & 0x8000 | 0x7B80
    pairs[4, 0], pairs[8, 0] = 0x7F80, 0x7FC0
    words = pairs[:, ::2] | pairs[:, 1::2] << 16
    words[:, 6:] = torch.randint(-128, 128, (32, 4), generator=random).float().view(torch.int32)
    return words


def tile_words() -> torch.Tensor:
    """As `tiles` takes them; the first float of a lane is what 2 is raised to."""
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(-(2**31), 2**31 - 1, (128,), generator=random).int()
    factors = torch.randint(-64, 64, (32, 12), generator=random).half().view(torch.int32)
    floats = torch.randn(32, 2, generator=random) * torch.tensor([20.0, 1000.0])
    floats[:3, 1] = torch.tensor([65520.0, 2.0**-25, torch.inf])
    return torch.cat([rows, torch.cat([factors, floats.view(torch.int32)], 1).flatten()])


@pytest.fixture(scope="module")
def on_host(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(made_on_host(ON_HOST, tmp_path_factory.mktemp("primitives"), *compiled.glob("*.o"))))


def made_on_host(text: str, folder: Path, *more: Path | str) -> Path:
    headers = "".join(f'#include "{name}"\n' for name in ("core/bits.hpp", "cuda/device/tiles.cuh"))
    (folder / "kernel.cpp").write_text(headers + text)
    command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-include", str(HERE / "cuda_on_host.hpp"), f"-I{CSRC}"]
    subprocess.run([*command, str(folder / "kernel.cpp"), *map(str, more), "-o", str(folder / "kernel.so")], check=True)
    return folder / "kernel.so"


def run_on_host(on_host: ctypes.CDLL, words: torch.Tensor, results: int, of_tiles: bool) -> torch.Tensor:
    given, out = words.numpy(), numpy.zeros((32, results), numpy.int32)
    assert on_host.run(given.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), of_tiles)
    return torch.from_numpy(out)


def test_the_emulation_finds_writes_outside_of_shared_memory(compiled: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ctypes.CDLL(str(made_on_host(OUT_OF_BOUNDS, tmp_path, *compiled.glob("*.o")))).run
    run.restype = ctypes.c_bool
    assert run(7, 0, 64) and run(15, 1, 64)
    assert not run(8, 0, 64) and not run(-1, 0, 64) and not run(16, 1, 64)
    assert not run(0, 1, 63)
    ctypes.CDLL(None).fflush(None)
    told = capfd.readouterr().err
    assert told.count("a CTA wrote outside of 32 bytes of shared memory") == 2 and "of 64 bytes" in told
    assert "a launch has 63 bytes of shared memory, its kernel uses 64" in told


def test_with_address_sanitizer_it_finds_reads_too(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """As tools/sanitize compiles kernels. The interpreter must begin with its library."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine")
    text = OUT_OF_BOUNDS.replace("[args.place] = 1", "[0] = (args.dynamic ? words : sums)[args.place]")
    library = made_on_host(text, tmp_path, "-fsanitize=address", HERE / "fibers_on_host.cpp")
    asked = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    found = Path(asked.stdout.strip())
    if not found.is_absolute():
        pytest.skip("no g++ with libasan.so on this machine")
    code = f"import ctypes, sys; print(ctypes.CDLL({str(library)!r}).run(*map(int, sys.argv[1:])) & 255)"
    environment = os.environ | {"LD_PRELOAD": str(found.resolve()), "ASAN_OPTIONS": "detect_leaks=0"}
    for place, dynamic in ((7, 0), (8, 0), (-1, 0), (15, 1), (16, 1)):
        with subtests.test(place=place, dynamic=dynamic):
            command = [sys.executable, "-c", code, str(place), str(dynamic), "64"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if place in (7, 15):
                assert (done.returncode, done.stdout) == (0, "1\n"), done
            else:
                assert done.returncode and "use-after-poison" in done.stderr, done


@pytest.fixture(scope="module", params=[words, extreme_words], ids=lambda made: made.__name__)
def given(request: pytest.FixtureRequest) -> torch.Tensor:
    return request.param()


@pytest.fixture(scope="module")
def emulated(on_host: ctypes.CDLL, given: torch.Tensor) -> torch.Tensor:
    return run_on_host(on_host, given, 15, False)


@pytest.fixture(scope="module")
def emulated_tiles(on_host: ctypes.CDLL) -> torch.Tensor:
    return run_on_host(on_host, tile_words(), 16, True)


def bytes_of(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return words.contiguous().view(torch.uint8).view(dtype).double()


def matrices(given: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """a [16, k] and b [k, 8] as PTX deals them out to lanes: word w of lane (g, t) is of row g + 8 (w % 2)."""
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


def products(given: torch.Tensor, dtype: torch.dtype, c: torch.Tensor) -> torch.Tensor:
    """c + a @ b, by lane."""
    a, b = matrices(given, dtype)
    whole = a @ b
    lanes = [[whole[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)] for g in range(8) for t in range(4)]
    return torch.tensor(lanes, dtype=torch.double) + c


def floats_of(results: torch.Tensor) -> torch.Tensor:
    """The sums of bfloat16, without the bits of a nan, which are no promise."""
    return results[:, :4].contiguous().view(torch.float32).double().nan_to_num(nan=12345.0, posinf=torch.inf, neginf=-torch.inf)


def test_products_are_those_of_the_matrices(given: torch.Tensor, emulated: torch.Tensor) -> None:
    c = given[:, 6:]
    wanted = products(given, torch.bfloat16, c.contiguous().view(torch.float32).double())
    assert torch.equal(floats_of(emulated), wanted.nan_to_num(nan=12345.0, posinf=torch.inf, neginf=-torch.inf))
    for first, dtype in ((4, torch.uint8), (10, torch.int8)):
        assert torch.equal(emulated[:, first : first + 4].to(torch.int64), (products(given, dtype, c.double()).to(torch.int64) + 2**31) % 2**32 - 2**31)


def test_conversions(given: torch.Tensor, emulated: torch.Tensor) -> None:
    halves = torch.stack([given[:, 0] & 0x7F, given[:, 0] >> 16 & 0x7F], 1)
    assert torch.equal(emulated[:, 8:9].contiguous().view(torch.bfloat16).int(), halves - 8)
    float8 = (given[:, 2:3] & -0x780F7810).view(torch.bfloat16).double() * 2.0**120  # & 0x87f087f0
    assert torch.equal(emulated[:, 14:15].contiguous().view(torch.bfloat16).double(), float8)
    lower = given[:, 1].to(torch.int64).remainder(2**16)
    wanted = torch.where(lower < 2**15, lower, lower - 2**16).to(torch.int16).view(torch.float16).float()
    assert torch.equal(emulated[:, 9].contiguous().view(torch.float32), wanted)


def test_matrices_are_loaded_as_they_lie_and_transposed(emulated_tiles: torch.Tensor) -> None:
    matrices = tile_words()[:128].view(torch.int16).view(4, 8, 8)
    for results, of in ((emulated_tiles[:, :4], matrices), (emulated_tiles[:, 4:8], matrices.transpose(1, 2))):
        lanes = [[of[i, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2].contiguous().view(torch.int32).item() for i in range(4)] for lane in range(32)]
        assert results.tolist() == lanes
    assert not emulated_tiles[:, 15].any()  # what is not there is 0


def test_products_of_float16_are_those_of_the_matrices(emulated_tiles: torch.Tensor) -> None:
    given = tile_words()[128:].view(32, 8)[:, :6].contiguous().view(torch.float16).double().view(32, 6, 2)
    a, b = torch.zeros(16, 16, dtype=torch.double), torch.zeros(16, 8, dtype=torch.double)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for half in range(2):
            k = slice(half * 8 + 2 * t, half * 8 + 2 * t + 2)
            a[g, k], a[g + 8, k], b[k, g] = given[lane, 2 * half], given[lane, 2 * half + 1], given[lane, 4 + half]
    whole = a @ b
    wanted = [[1 + i + whole[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2].item() for i in range(4)] for lane in range(32)]
    assert emulated_tiles[:, 8:12].contiguous().view(torch.float32).tolist() == wanted


def test_pairs_are_rounded_to_nearest_and_powers_of_2_are_close(emulated_tiles: torch.Tensor) -> None:
    floats = tile_words()[128:].view(32, 8)[:, 6:].contiguous().view(torch.float32)
    for column, dtype in ((12, torch.bfloat16), (13, torch.float16)):
        assert torch.equal(emulated_tiles[:, column].contiguous().view(dtype).view(32, 2), floats.to(dtype))
    powers = emulated_tiles[:, 14].contiguous().view(torch.float32)
    torch.testing.assert_close(powers.double(), torch.exp2(floats[:, 0].double()), rtol=2.0**-22, atol=0)


def compiled_on_gpu(name: str) -> Callable[..., None]:
    names = ("gpu/device/std.cuh", "cuda/device/std.cuh", "core/bits.hpp", "core/dtype.hpp", "cuda/device/prelude.cuh", "cuda/device/mma.cuh", "cuda/device/tiles.cuh")
    headers = [(CSRC / header).read_text() for header in names]
    text = "".join(line for header in headers for line in header.splitlines(keepends=True) if not line.startswith(("#include", "#pragma once")))
    return torch.cuda._compile_kernel(text + ON_GPU, name, nvcc_options=["-std=c++20", "-default-device"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_silicon_gives_the_bits_of_the_emulation(given: torch.Tensor, emulated: torch.Tensor) -> None:
    out = torch.zeros(32, 15, dtype=torch.int32, device="cuda")
    compiled_on_gpu("kernel")((1, 1, 1), (32, 1, 1), (given.cuda(), out))
    assert torch.equal(out.cpu()[:, 4:], emulated[:, 4:]) and torch.equal(floats_of(out.cpu()), floats_of(emulated))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_silicon_gives_the_bits_of_emulated_tiles(emulated_tiles: torch.Tensor) -> None:
    out = torch.zeros(32, 16, dtype=torch.int32, device="cuda")
    compiled_on_gpu("tile_kernel")((1, 1, 1), (32, 1, 1), (tile_words().cuda(), out))
    powers, wanted = (t[:, 14].contiguous().view(torch.float32) for t in (out.cpu(), emulated_tiles))
    assert torch.equal(out.cpu()[:, :14], emulated_tiles[:, :14]) and torch.equal(out.cpu()[:, 15], emulated_tiles[:, 15])
    torch.testing.assert_close(powers, wanted, rtol=2.0**-21, atol=0)
