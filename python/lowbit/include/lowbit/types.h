/* SPDX-License-Identifier: Apache-2.0 */
/* Types that lowbit/lowbit.h and lowbit/backend.h share. The numbers of enumerations never change; new ones are
 * appended. */
#ifndef LOWBIT_TYPES_H
#define LOWBIT_TYPES_H

#include <stddef.h>
#include <stdint.h>

enum lowbit_dtype {
  LOWBIT_FLOAT32, LOWBIT_BFLOAT16, LOWBIT_FLOAT16, LOWBIT_FLOAT64, LOWBIT_UINT8, LOWBIT_INT8, LOWBIT_INT32,
  LOWBIT_INT64, LOWBIT_BOOL, LOWBIT_NOT_GIVEN
};

/* A tensor; dtype LOWBIT_NOT_GIVEN: none was given. */
typedef struct lowbit_tensor {
  void *data;                    /* on the device; may be NULL where a row is only asked whether it fits */
  const int64_t *shape, *stride; /* [rank], strides in elements; lowbit.h: stride NULL is contiguous */
  int32_t rank, dtype;
} lowbit_tensor;

enum lowbit_format {
  LOWBIT_FORMAT_FLOAT32, LOWBIT_FORMAT_BFLOAT16, LOWBIT_FORMAT_FLOAT16, LOWBIT_FORMAT_INT8, LOWBIT_FORMAT_INT4,
  LOWBIT_FORMAT_NF4, LOWBIT_FORMAT_FP4, LOWBIT_FORMAT_FP4_E2M1, LOWBIT_FORMAT_FP8_E4M3, LOWBIT_FORMAT_INT2,
  LOWBIT_FORMAT_INT3, LOWBIT_FORMAT_INT5, LOWBIT_FORMAT_INT6, LOWBIT_FORMAT_INT7, LOWBIT_FORMAT_INT8_SEMI_SPARSE
};
enum lowbit_layout { LOWBIT_LAYOUT_X86_PANEL_16X64, LOWBIT_LAYOUT_ROW_MAJOR };

/* How the range of a group becomes its scale, and whether that one is taken or the one with the least error. */
enum lowbit_mapping {
  LOWBIT_MAPPING_SYMMETRIC, LOWBIT_MAPPING_SYMMETRIC_NO_CLIPPING_ERR, LOWBIT_MAPPING_ASYMMETRIC
};
enum lowbit_scale_choice { LOWBIT_SCALE_ABSMAX, LOWBIT_SCALE_SEARCH };

/* How activations enter linear: as floats, or rounded to 8 bits with a scale per row, or per row and group. */
enum lowbit_x_format {
  LOWBIT_X_FLOAT, LOWBIT_X_INT8_GROUP, LOWBIT_X_INT8_ROW, LOWBIT_X_INT8_ROW_ASYMMETRIC, LOWBIT_X_FLOAT8_ROW
};
enum lowbit_activation {
  LOWBIT_ACTIVATION_NONE, LOWBIT_ACTIVATION_RELU, LOWBIT_ACTIVATION_GELU, LOWBIT_ACTIVATION_GELU_TANH,
  LOWBIT_ACTIVATION_SILU, LOWBIT_ACTIVATION_RELU_SQUARED /* of experts alone */
};

#endif
