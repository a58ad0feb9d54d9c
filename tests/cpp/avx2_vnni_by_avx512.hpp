// SPDX-License-Identifier: Apache-2.0
// avx2_vnni with the instructions of AVX-512 VNNI on 256 bits, which compute the same: for machines that
// have only those.
#pragma once

#include <immintrin.h>

#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
#define _mm256_dpwssd_avx_epi32 _mm256_dpwssd_epi32
#include "cpu/simd/avx2_vnni.hpp"
