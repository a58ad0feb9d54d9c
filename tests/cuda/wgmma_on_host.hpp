// SPDX-License-Identifier: Apache-2.0
// The instructions of cuda/device/wgmma.cuh on the host. A product is made at the worst of times: when its warp waits
// for it, from what its registers and shared memory hold then, or at once, as a coin falls.
// Included by cuda_on_host.hpp.
#pragma once

namespace on_host {

struct FirstFactor {
  const uint32_t* registers;  // of this lane; null: rows in shared memory
  const void* rows = nullptr;
};
// To `count` times 4 results of this lane at c, by words of bfloat16, of float16, or of bytes (then c is int32). A row
// of the second factor is a column of the result, in which a word lies; or it is a k, two to a word.
// Bytes in shared memory from 8 rows to the next, and from 8 columns of matrices to the next, or 64 of lines.
struct Steps {
  bool lines;
  int rows, columns;
};
enum class Words { bf16, f16, bytes };
void multiply_by_shared(Words words, void* c, int count, const FirstFactor& first, bool rows_are_k, Steps steps,
                        const void* second, bool adds);

}  // namespace on_host

namespace lowbit::cuda {

inline void begin_products() {}
inline void show_to_products() {}
template <bool kMore, int kCount>
void set_registers() {}
void commit_products();
void make_products(int pending);  // of all groups but so many
template <int kPending>
void wait_for_products() { make_products(kPending); }
template <class Sum, int kCount>
void hold(Sum (&)[kCount][4]) {}
template <int kCount>
void fresh(float (&c)[kCount][4]) {
  for (auto& of : c)
    for (float& sum : of) sum = __builtin_nanf("");
}

template <auto dtype>  // a DType
constexpr auto kWords = dtype == decltype(dtype)::bfloat16 ? on_host::Words::bf16 : on_host::Words::f16;
template <auto dtype, int kRowsStep, int kCount>
void multiply_by_shared(float (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  on_host::multiply_by_shared(kWords<dtype>, c, kCount, {a}, false, {false, kRowsStep, 128}, second, adds);
}
template <auto dtype, int kCount>
void multiply_by_lines(float (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  on_host::multiply_by_shared(kWords<dtype>, c, kCount, {a}, false, {true, 1024, 0}, second, adds);
}
template <auto dtype, int kPanelStep, int kCount>
void multiply_by_lines_of_k(float (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  on_host::multiply_by_shared(kWords<dtype>, c, kCount, {a}, true, {true, 1024, kPanelStep}, second, adds);
}
template <auto dtype, int kCount>
void multiply_lines(float (&c)[kCount][4], const void* first, const void* second, bool adds) {
  on_host::multiply_by_shared(kWords<dtype>, c, kCount, {nullptr, first}, false, {true, 1024, 0}, second, adds);
}
template <int kRowsStep, int kCount>
void multiply_by_shared(int32_t (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  on_host::multiply_by_shared(on_host::Words::bytes, c, kCount, {a}, false, {false, kRowsStep, 128}, second, adds);
}

inline uint32_t computed(uint32_t a) { return a; }
uint32_t scale_f16x2(uint32_t a, uint32_t less, uint32_t scale);
uint32_t scale_bf16x2(uint32_t a, uint32_t high, uint32_t low);

}  // namespace lowbit::cuda
