// SPDX-License-Identifier: Apache-2.0
// The products of dpas, by shuffles, for OpenCL on a CPU: the functions of cl_intel_subgroup_matrix_multiply_accumulate that
// csrc/level_zero/device/matrix.hpp declares. Of a row of the first factor a lane holds 2 bytes (16 lanes) or 4 (8).
int __attribute__((overloadable, convergent)) intel_sub_group_shuffle(int value, uint lane);

#define ONCE __attribute__((overloadable, noinline))  // else a module takes a minute to compile

float bf16(int bits) { return as_float(bits << 16); }
float f16(int bits) { return vload_half(0, (const half*)&bits); }

#define OF_ROWS(name, A, B, Sum)                                                                              \
  Sum##2 __attribute__((overloadable)) name(A##2 a, B b, Sum##2 sum) {                                        \
    return (Sum##2)(name(a.s0, b, sum.s0), name(a.s1, b, sum.s1));                                            \
  }                                                                                                           \
  Sum##4 __attribute__((overloadable)) name(A##4 a, B b, Sum##4 sum) {                                        \
    return (Sum##4)(name(a.s01, b, sum.s01), name(a.s23, b, sum.s23));                                        \
  }                                                                                                           \
  Sum##8 __attribute__((overloadable)) name(A##8 a, B b, Sum##8 sum) {                                        \
    return (Sum##8)(name(a.s0123, b, sum.s0123), name(a.s4567, b, sum.s4567));                                \
  }

#define OF_FLOATS(type, A, bytes)                                                                            \
  float ONCE intel_sub_group_##type##_##type##_matrix_mad_k16(A a, int8 b, float sum) {                      \
    const int words[8] = {b.s0, b.s1, b.s2, b.s3, b.s4, b.s5, b.s6, b.s7};                                   \
    for (int k = 0; k < 16; k++) {                                                                           \
      const int of_lane = intel_sub_group_shuffle((int)a, 2 * k / bytes) >> 8 * (2 * k % bytes);             \
      sum += type(of_lane & 0xffff) * type(words[k / 2] >> 16 * (k % 2) & 0xffff);                           \
    }                                                                                                        \
    return sum;                                                                                              \
  }                                                                                                          \
  OF_ROWS(intel_sub_group_##type##_##type##_matrix_mad_k16, A, int8, float)

#define FUNCTIONS(A, bytes)                                                                                  \
  OF_FLOATS(bf16, A, bytes)                                                                                  \
  OF_FLOATS(f16, A, bytes)                                                                                   \
  int ONCE intel_sub_group_i8_u8_matrix_mad_k32(A a, uint8 b, int sum) {                                     \
    const uint words[8] = {b.s0, b.s1, b.s2, b.s3, b.s4, b.s5, b.s6, b.s7};                                  \
    for (int k = 0; k < 32; k++) {                                                                           \
      const int of_lane = intel_sub_group_shuffle((int)a, k / bytes) >> 8 * (k % bytes);                     \
      sum += (int)(char)of_lane * (int)(uchar)(words[k / 4] >> 8 * (k % 4));                                 \
    }                                                                                                        \
    return sum;                                                                                              \
  }                                                                                                          \
  OF_ROWS(intel_sub_group_i8_u8_matrix_mad_k32, A, uint8, int)

FUNCTIONS(short, 2)
FUNCTIONS(int, 4)
