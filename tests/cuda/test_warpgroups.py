# SPDX-License-Identifier: Apache-2.0
"""The instructions of cuda/device/wgmma.cuh for 16-bit floats, and copies that a barrier knows of: what the emulation makes of them, and
silicon where there is some, against torch. They are what attention by warpgroups is made of (csrc/cuda/attention/matrices.cuh)."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch
from test_on_gpu import of_hopper
from test_primitives import CSRC, made_on_host

DTYPES = (torch.bfloat16, torch.float16)
# A warpgroup multiplies a [64, 16] by b [16, 64], which it also has transposed, in three ways.
BODY = """
#include "cuda/attention/matrices.cuh"
#include "cuda/device/barrier.cuh"
namespace lowbit::cuda {
struct Products {
  const uint16_t *a, *b, *transposed;
  float* out;  // [3][128][8][4]
};
template <DType dtype>
LOWBIT_INLINE void multiply(const Products& of) {
  using Tall = SharedLines<64, 16>;
  using Wide = SharedLines<32, 64>;  // 16 rows are not there
  LOWBIT_SHARED(Tall, a, [1]);
  LOWBIT_SHARED(Tall, columns, [1]);
  LOWBIT_SHARED(Wide, rows, [1]);
  LOWBIT_SHARED(Barrier, full, [1]);
  if (threadIdx.x == 0) set_up(full[0], 128), show_barriers();
  __syncthreads();
  a[0].copy(of.a, 16, 64), columns[0].copy(of.transposed, 16, 64), rows[0].copy(of.b, 64, 16);
  arrive_with_copies(full[0]);
  const int g = lane_of_warp() / 4, t = lane_of_warp() % 4;
  uint32_t registers[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    registers[i] = computed(*reinterpret_cast<const uint32_t*>(of.a + (warp_of_cta() * 16 + g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8));
  wait_for(full[0], 0);
  show_to_products();
  float c[3][8][4];
  begin_products();
  multiply_by_lines<dtype>(c[0], registers, columns[0].at(0, 0), false);
  multiply_by_lines_of_k<dtype, Wide::kPanelStep>(c[1], registers, rows[0].at(0, 0), false);
  multiply_by_lines_of_k<dtype, Wide::kPanelStep>(c[1], registers, rows[0].at(16, 0), true);  // zeros
  multiply_lines<dtype>(c[2], a[0].at(0, 0), columns[0].at(0, 0), false);
  commit_products();
  wait_for_products<0>();
#pragma unroll
  for (int way = 0; way < 3; way++) {
    hold(c[way]);
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) of.out[((way * 128 + threadIdx.x) * 8 + j) * 4 + i] = c[way][j][i];
  }
}
}  // namespace lowbit::cuda
LOWBIT_KERNEL(bfloat16, 128, lowbit::cuda::Products) { lowbit::cuda::multiply<lowbit::DType::bfloat16>(args); }
LOWBIT_KERNEL(float16, 128, lowbit::cuda::Products) { lowbit::cuda::multiply<lowbit::DType::float16>(args); }
"""
ON_HOST = BODY + """
extern "C" bool run(const uint16_t* a, const uint16_t* b, const uint16_t* transposed, float* out, bool is_float16, unsigned seed) {
  const lowbit::cuda::Products args{a, b, transposed, out};
  return lowbit_run_grid(reinterpret_cast<void (*)(const void*)>(is_float16 ? float16 : bfloat16), &args, 1, 128, 0, seed, false);
}
"""

ON_GPU = '#include "cuda/device/prelude.cuh"\n' + BODY.split("LOWBIT_KERNEL")[0] + """
using namespace lowbit::cuda;
extern "C" __global__ void on_gpu(const uint16_t* a, const uint16_t* b, const uint16_t* transposed, float* out, int is_float16) {
  const Products of{a, b, transposed, out};
  if (is_float16) multiply<lowbit::DType::float16>(of);
  else multiply<lowbit::DType::bfloat16>(of);
}
"""


def folder_of_std(folder: Path) -> Path:
    """Headers of the C++ library as runtime/device_headers.cpp has them."""
    for path in (path for pattern in ("*.hpp", "*.cuh") for path in CSRC.rglob(pattern)):
        for name in re.findall(r"^#include <(\w+)>", path.read_text(), re.MULTILINE):
            (folder / name).write_text('#include "cuda/device/std.cuh"\n')
    return folder


def factors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers whose products are exact sums, each of which is another if one factor lies elsewhere."""
    random = torch.Generator().manual_seed(0)
    return tuple(torch.randint(-100, 100, shape, generator=random).to(dtype) for shape in ((64, 16), (16, 64)))


def matrices_of(out: torch.Tensor) -> torch.Tensor:
    """[3, 64, 64] of what lanes (g, t) hold of 8 columns: rows g and g + 8 of their warp, columns 2t and 2t + 1."""
    lanes = out.view(3, 4, 8, 4, 8, 2, 2)  # way, warp, g, t, j, half, column of two
    return lanes.permute(0, 1, 5, 2, 4, 3, 6).reshape(3, 64, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_a_warpgroup_are_those_of_the_matrices(dtype: torch.dtype, compiled: Path, tmp_path: Path) -> None:
    run = ctypes.CDLL(str(made_on_host(ON_HOST, tmp_path, *compiled.glob("*.o")))).run
    run.restype = ctypes.c_bool
    a, b = factors(dtype)
    for seed in range(4):
        out = torch.full((3, 128, 8, 4), torch.nan)
        transposed = b.T.contiguous()
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (a, b, transposed, out))
        assert run(*pointers, dtype is torch.float16, seed)
        assert torch.equal(matrices_of(out), (a.float() @ b.float()).expand(3, 64, 64))


@pytest.mark.gpu
@of_hopper
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_a_warpgroup_of_silicon_are_those_of_the_matrices(dtype: torch.dtype, tmp_path: Path) -> None:
    folders, options = [str(CSRC), str(folder_of_std(tmp_path))], ["-std=c++20", "-default-device", "-fmad=false"]
    kernel = torch.cuda._compile_kernel(ON_GPU, "on_gpu", compute_capability="90a", cuda_include_dirs=folders, nvcc_options=options)
    a, b = (t.cuda() for t in factors(dtype))
    out = torch.full((3, 128, 8, 4), torch.nan, device="cuda")
    kernel((1, 1, 1), (128, 1, 1), (a, b, b.T.contiguous(), out, int(dtype is torch.float16)))
    assert torch.equal(matrices_of(out.cpu()), (a.float() @ b.float()).cpu().expand(3, 64, 64))
