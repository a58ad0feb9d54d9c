// SPDX-License-Identifier: Apache-2.0
// What dpas does, by shuffles, for OpenCL on a CPU: the functions of cl_intel_subgroup_matrix_multiply_accumulate that
// csrc/level_zero/device/matrix.hpp declares. Of a row of the first factor a lane holds 2 bytes (16 lanes) or 4 (8).
float bfloat16(int bits) { return as_float(bits << 16); }

#define OF_EIGHT_ROWS(name, A, B, Sum)                                                                        \
  Sum##8 __attribute__((overloadable)) name(A##8 a, B b, Sum##8 sum) {                                        \
    return (Sum##8)(name(a.s0, b, sum.s0), name(a.s1, b, sum.s1), name(a.s2, b, sum.s2), name(a.s3, b, sum.s3), \
                    name(a.s4, b, sum.s4), name(a.s5, b, sum.s5), name(a.s6, b, sum.s6), name(a.s7, b, sum.s7)); \
  }

#define FUNCTIONS(A, bytes)                                                                                  \
  float __attribute__((overloadable)) intel_sub_group_bf16_bf16_matrix_mad_k16(A a, int8 b, float sum) {     \
    const int words[8] = {b.s0, b.s1, b.s2, b.s3, b.s4, b.s5, b.s6, b.s7};                                   \
    for (int k = 0; k < 16; k++) {                                                                           \
      const int of_lane = intel_sub_group_shuffle((int)a, 2 * k / bytes) >> 8 * (2 * k % bytes);             \
      sum += bfloat16(of_lane & 0xffff) * bfloat16(words[k / 2] >> 16 * (k % 2) & 0xffff);                   \
    }                                                                                                        \
    return sum;                                                                                              \
  }                                                                                                          \
  int __attribute__((overloadable)) intel_sub_group_i8_u8_matrix_mad_k32(A a, uint8 b, int sum) {            \
    const uint words[8] = {b.s0, b.s1, b.s2, b.s3, b.s4, b.s5, b.s6, b.s7};                                  \
    for (int k = 0; k < 32; k++) {                                                                           \
      const int of_lane = intel_sub_group_shuffle((int)a, k / bytes) >> 8 * (k % bytes);                     \
      sum += (int)(char)of_lane * (int)(uchar)(words[k / 4] >> 8 * (k % 4));                                 \
    }                                                                                                        \
    return sum;                                                                                              \
  }                                                                                                          \
  OF_EIGHT_ROWS(intel_sub_group_bf16_bf16_matrix_mad_k16, A, int8, float)                                    \
  OF_EIGHT_ROWS(intel_sub_group_i8_u8_matrix_mad_k32, A, uint8, int)

FUNCTIONS(short, 2)
FUNCTIONS(int, 4)
