// SPDX-License-Identifier: Apache-2.0
// libcublasLt.so.13 of a machine without a GPU: products of bfloat16, float16 and int8 on the host. It refuses what
// we never ask for, and memory that is less aligned than the algorithm was found for. LOWBIT_EMULATED_FAIL (see
// emulated_cuda.cpp) makes a function fail; LOWBIT_EMULATED_NO_ALGORITHM=1 finds none; LOWBIT_EMULATED_NO_PRODUCTS=1
// leaves all sums 0.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int kInvalidValue = 7, kNotSupported = 15;

struct Description { int compute, scale, transpose_a; };
struct Layout { int type; uint64_t rows, columns; int64_t stride; };
struct Preference { std::size_t workspace; uint32_t reductions, alignment[4]; };
struct Heuristic { uint64_t algorithm[8]; std::size_t workspace; int status; float waves; int reserved[4]; };

int failure(const char* function) {
  const char* told = std::getenv("LOWBIT_EMULATED_FAIL");
  const std::string fail = told ? told : "", wanted = std::string(function) + ":";
  return fail.starts_with(wanted) ? std::stoi(fail.substr(wanted.size())) : 0;
}

bool is_on(const char* variable) {
  const char* told = std::getenv(variable);
  return told && std::strcmp(told, "1") == 0;
}

float as_float(const void* from, int type, uint64_t at) {
  const uint16_t bits = static_cast<const uint16_t*>(from)[at];
  if (type == 14) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    return std::memcpy(&value, &wide, 4), value;
  }
  _Float16 half;
  return std::memcpy(&half, &bits, 2), static_cast<float>(half);
}

uint16_t bfloat16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

bool is_aligned(const void* data, uint64_t to) { return reinterpret_cast<uintptr_t>(data) % to == 0; }

}  // namespace

#define EMULATED extern "C" __attribute__((visibility("default"))) int
#define FAILS_AS_TOLD(function) \
  if (const int failed = failure(function)) return failed

EMULATED cublasLtCreate(void** handle) {
  FAILS_AS_TOLD("cublasLtCreate");
  return *handle = handle, 0;
}
EMULATED cublasLtMatmulDescCreate(Description** made, int compute, int scale) {
  return *made = new Description{compute, scale, 0}, 0;
}
EMULATED cublasLtMatmulDescSetAttribute(Description* of, int attribute, const void* value, std::size_t bytes) {
  if (attribute != 3 || bytes != 4) return kInvalidValue;
  return std::memcpy(&of->transpose_a, value, 4), 0;
}
EMULATED cublasLtMatmulDescDestroy(Description* of) { return delete of, 0; }
EMULATED cublasLtMatrixLayoutCreate(Layout** made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  if (stride < static_cast<int64_t>(rows)) return kInvalidValue;
  return *made = new Layout{type, rows, columns, stride}, 0;
}
EMULATED cublasLtMatrixLayoutDestroy(Layout* of) { return delete of, 0; }
EMULATED cublasLtMatmulPreferenceCreate(Preference** made) { return *made = new Preference{}, 0; }
EMULATED cublasLtMatmulPreferenceSetAttribute(Preference* of, int attribute, const void* value, std::size_t bytes) {
  if (attribute == 1 && bytes == 8) return std::memcpy(&of->workspace, value, 8), 0;
  if (attribute == 3 && bytes == 4) return std::memcpy(&of->reductions, value, 4), 0;
  if (attribute >= 5 && attribute <= 8 && bytes == 4) return std::memcpy(&of->alignment[attribute - 5], value, 4), 0;
  return kInvalidValue;
}
EMULATED cublasLtMatmulPreferenceDestroy(Preference* of) { return delete of, 0; }
EMULATED cublasLtMatmulAlgoGetHeuristic(void*, const Description* of, const Layout* a, const Layout* b, const Layout* c,
                                        const Layout* d, const Preference* preference, int wanted, Heuristic* found,
                                        int* count) {
  FAILS_AS_TOLD("cublasLtMatmulAlgoGetHeuristic");
  const bool codes = a->type == 3;
  if (of->compute != (codes ? 72 : 68) || of->scale != (codes ? 10 : 0) || b->type != a->type ||
      (d->type != of->scale && (codes || d->type != a->type)))
    return kInvalidValue;
  if (of->transpose_a != 1 || wanted < 1 || preference->reductions != 2 || preference->workspace == 0)
    return kInvalidValue;
  if (codes && (a->stride % 4 != 0 || b->stride % 4 != 0)) return *count = 0, kNotSupported;
  if (a->rows != b->rows || a->columns != d->rows || b->columns != d->columns || c->rows != d->rows)
    return kInvalidValue;
  if (is_on("LOWBIT_EMULATED_NO_ALGORITHM")) return *count = 0, kNotSupported;
  *found = {};
  for (int i = 0; i < 4; i++) found->algorithm[i] = preference->alignment[i];
  return *count = 1, 0;
}
EMULATED cublasLtMatmul(void*, const Description*, const void* alpha, const void* a, const Layout* of_a, const void* b,
                        const Layout* of_b, const void* beta, const void* c, const Layout*, void* d,
                        const Layout* of_d, const uint64_t* algorithm, void* workspace, std::size_t bytes, void*) {
  FAILS_AS_TOLD("cublasLtMatmul");
  const bool codes = of_a->type == 3;
  const float one = 1;
  const int32_t one_code = 1, zero = 0;
  const void* wanted = codes ? static_cast<const void*>(&one_code) : &one;
  if (std::memcmp(alpha, wanted, 4) != 0 || std::memcmp(beta, &zero, 4) != 0) return kInvalidValue;
  if (!workspace || !bytes) return kInvalidValue;
  if (!is_aligned(a, algorithm[0]) || !is_aligned(b, algorithm[1]) || !is_aligned(c, algorithm[2]) ||
      !is_aligned(d, algorithm[3]))
    return kInvalidValue;
  const bool without = is_on("LOWBIT_EMULATED_NO_PRODUCTS");
  for (uint64_t column = 0; column < of_d->columns; column++)
    for (uint64_t row = 0; row < of_d->rows; row++) {
      const uint64_t of_row = row * static_cast<uint64_t>(of_a->stride),
                     of_column = column * static_cast<uint64_t>(of_b->stride),
                     at = column * static_cast<uint64_t>(of_d->stride) + row;
      float sum = 0;
      int32_t sum_of_codes = 0;
      for (uint64_t k = 0; k < (without ? 0 : of_a->rows); k++)
        if (codes)
          sum_of_codes += static_cast<const int8_t*>(a)[of_row + k] * static_cast<const int8_t*>(b)[of_column + k];
        else
          sum += as_float(a, of_a->type, of_row + k) * as_float(b, of_b->type, of_column + k);
      if (codes) static_cast<int32_t*>(d)[at] = sum_of_codes;
      else if (of_d->type == 14) static_cast<uint16_t*>(d)[at] = bfloat16_of(sum);
      else static_cast<float*>(d)[at] = sum;
    }
  return 0;
}
