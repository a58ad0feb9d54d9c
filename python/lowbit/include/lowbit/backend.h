/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels for lowbit from a shared library of your own: C99 and C++, nothing to link. docs/devices.md tells how the
 * library is found, docs/recipes/add_a_backend.md is a whole package.
 *
 * The library exports lowbit_backend_rows(), a table of rows. A row serves one op on one type of device: refuses() says
 * whether it can run a call, run() runs it. Both get the arguments of the op, lowbit_<op>_args, which are checked: the
 * comments on tensors below hold.
 *
 * A table of another version, or with another size of a struct, is refused whole. Two ops are not offered to rows of
 * others, score_program and block_classes, and neither is an attention with a score_mod or a mask_mod: these are
 * programs, no plain data. */
#ifndef LOWBIT_BACKEND_H
#define LOWBIT_BACKEND_H

#include <string.h>

#include <lowbit/types.h>

#define LOWBIT_BACKEND_API 1

#if defined(_WIN32)
#define LOWBIT_BACKEND_EXPORT __declspec(dllexport)
#else
#define LOWBIT_BACKEND_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lowbit_place {
  const char *device; /* "cpu", "cuda", "lowbit_sim" */
  void *stream;       /* that the work has to join; NULL: the default stream, or none */
  int32_t index;
} lowbit_place;

/* First in every lowbit_<op>_args. */
typedef struct lowbit_call {
  size_t struct_size; /* of the whole struct */
  int32_t api_version;
  lowbit_place place;
} lowbit_call;

/* A weight [n, k] as it is packed: a uint8 matrix [rows, row_bytes], whose row r holds the weight's columns n from
 * r * columns on. Sections of a row begin at these bytes; -1: there is none.
 *   w[n, k] = column_scale[n] * group_scale[k / group_size, n] * (code - zero[k / group_size, n])
 * column_scale float32 [columns]; group_scale and zero float16 [groups, columns]. Without group_scale it is 1; without
 * zero, that is 2^(bits - 1) of an integer format and 0 of the others, whose codes stand for levels. Formats float32,
 * bfloat16 and float16 have the values alone. lowbit_code() reads the codes of LOWBIT_LAYOUT_X86_PANEL_16X64, which is
 * the layout wherever no other is said. */
typedef struct lowbit_weight {
  const uint8_t *data;
  int64_t rows, row_bytes, columns;
  int64_t n, k, group_size; /* group_size 0: one scale per column */
  int64_t column_scale, column_sum, group_scale, zero, codes;
  int32_t format, layout, bits, asymmetric;
} lowbit_weight;

/* y = act(x @ w.T + bias) * mul + add; x_format says how x enters the product. */
typedef struct lowbit_linear_args {
  lowbit_call call;
  lowbit_weight weight;
  lowbit_tensor x;        /* [m, k] float32, bfloat16 or float16, contiguous */
  lowbit_tensor bias;     /* [n] of the three dtypes, or none */
  lowbit_tensor mul, add; /* [m, n], dtype of x, contiguous, or none */
  lowbit_tensor y;        /* [m, n], dtype of x, contiguous: written */
  int32_t x_format, activation;
} lowbit_linear_args;

typedef struct lowbit_quantize_args {
  lowbit_call call;
  lowbit_weight out;        /* how `packed` is laid out */
  lowbit_tensor weight;     /* [n, k] float32, bfloat16 or float16, contiguous, finite */
  lowbit_tensor importance; /* float32 [k], or none */
  lowbit_tensor packed;     /* uint8 [rows, row_bytes]: written */
  lowbit_tensor distortion; /* float64 [3] on the host, written: sums of w^2, of (w - dequantized)^2, the latter with
                               scale_choice absmax; each times importance / 2^i for an i of your own */
  int32_t mapping, scale_choice; /* enum lowbit_mapping, enum lowbit_scale_choice */
} lowbit_quantize_args;

typedef struct lowbit_repack_args {
  lowbit_call call;
  lowbit_weight from, to;    /* one weight in two layouts */
  lowbit_tensor packed, out; /* uint8 [rows, row_bytes] of them; out: written */
} lowbit_repack_args;

/* out[i] = w[indices[i]], or w where there are none. */
typedef struct lowbit_dequantize_args {
  lowbit_call call;
  lowbit_weight weight;  /* of any layout where there are indices */
  lowbit_tensor packed;
  lowbit_tensor out;     /* [n, k] or [*indices, k], float32, bfloat16 or float16: written */
  lowbit_tensor indices; /* int32 or int64, contiguous, or none */
  lowbit_tensor outside; /* with indices: int64 [1] on the host, set to the place of an index outside 0..n-1 */
} lowbit_dequantize_args;

typedef struct lowbit_all_finite_args {
  lowbit_call call;
  lowbit_tensor tensor; /* float32, bfloat16 or float16, contiguous */
  lowbit_tensor result; /* bool [1] on the host: written */
} lowbit_all_finite_args;

/* A weight of 4 bits as bitsandbytes keeps it (csrc/ops/blocks.hpp has the formula). */
typedef struct lowbit_blocked_weight {
  int64_t numel, block_size;
  lowbit_tensor codes;                         /* uint8 [ceil(numel / 2)], the first code in the high nibble */
  lowbit_tensor absmax;                        /* float32 [blocks], or one per 256 of them beside scale_codes */
  lowbit_tensor scale_codes, code_map, offset; /* uint8 [blocks], float32 [256], one float32; or none */
  int32_t format;                              /* LOWBIT_FORMAT_NF4 or _FP4 */
} lowbit_blocked_weight;

typedef struct lowbit_blocks_linear_args {
  lowbit_call call;
  lowbit_blocked_weight weight;
  lowbit_tensor x, bias, y; /* [m, k], [n] or none, [m, n]: written */
} lowbit_blocks_linear_args;

typedef struct lowbit_blocks_dequantize_args {
  lowbit_call call;
  lowbit_blocked_weight weight;
  lowbit_tensor out; /* weights begin, begin + 1, ...: written */
  int64_t begin;
} lowbit_blocks_dequantize_args;

/* y = (x @ w.T) * row_scale * column_scale / 127^2 + bias */
typedef struct lowbit_int8_linear_args {
  lowbit_call call;
  lowbit_tensor x, weight, row_scale, column_scale, bias, y; /* int8 [m, k], [n, k]; float32 [m], [n]; [m, n] */
} lowbit_int8_linear_args;

enum lowbit_rule { LOWBIT_ADAMW, LOWBIT_SGD, LOWBIT_LION, LOWBIT_MUON };
enum lowbit_state_format {
  LOWBIT_STATE_FLOAT32, LOWBIT_STATE_BFLOAT16, LOWBIT_STATE_DYNAMIC8, LOWBIT_STATE_DYNAMIC4, LOWBIT_STATE_FLOAT8
};

/* Addresses on the device; of a dtype's enumeration above. */
typedef struct lowbit_optim_tensor {
  void *param, *grad;
  int8_t param_dtype, grad_dtype;
  void *moment[3];
  float *scale[3]; /* one per block; NULL in float formats */
  int64_t numel;
  float *step_count; /* counted up by the row */
} lowbit_optim_tensor;

/* One step over a list of tensors, in place (csrc/ops/optim.hpp has the formula, csrc/rules the rules). */
typedef struct lowbit_optim_step_args {
  lowbit_call call;
  const lowbit_optim_tensor *tensors;
  int64_t tensor_count, block_size;
  lowbit_tensor grad_scale, found_inf; /* float32 [1] on the device, or none */
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
  int32_t decoupled, maximize, amsgrad, nesterov;
  int32_t rule, moments, format, stochastic_rounding;
  uint64_t seed;
} lowbit_optim_step_args;

typedef struct lowbit_encode_state_args {
  lowbit_call call;
  lowbit_tensor values, codes, scale; /* float32; uint8 and float32 [blocks]: written */
  int64_t block_size;
  int32_t format, is_signed;
} lowbit_encode_state_args;

typedef struct lowbit_decode_state_args {
  lowbit_call call;
  lowbit_tensor codes, scale, values; /* values: written */
  int64_t block_size;
  int32_t format, is_signed;
} lowbit_decode_state_args;

/* out = dropout(softmax(scale * q k^T + mask, with the sink as one more column)) v; csrc/ops/attention.hpp. */
typedef struct lowbit_attention_forward_args {
  lowbit_call call;
  lowbit_tensor q, k, v;    /* [B, Hq, L, E], [B, Hkv, S, E], [B, Hkv, S, Ev]; last dimension dense */
  lowbit_tensor out;        /* [B, Hq, L, Ev], dtype of q or float32: written */
  lowbit_tensor lse;        /* float32 (float64 of float64) [B, Hq, L], contiguous: written; or none */
  lowbit_tensor max_scores; /* likewise */
  lowbit_tensor mask;       /* bool or floating [B, Hq, L, S], any strides, or none */
  lowbit_tensor sink;       /* float32 (or float64) [Hq], or none */
  lowbit_tensor seed;       /* of dropout: int64 [1], or none */
  lowbit_tensor kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices; /* of torch's BlockMask, or none */
  int64_t q_block, kv_block;
  double scale, dropout_p;
  int32_t causal;
} lowbit_attention_forward_args;

typedef struct lowbit_attention_backward_args {
  lowbit_call call;
  lowbit_attention_forward_args forward; /* with out and lse as the forward left them */
  lowbit_tensor grad_out, grad_lse;      /* like out; like lse, or none */
  lowbit_tensor grad_q, grad_k, grad_v;  /* like q, k, v: written */
  lowbit_tensor grad_mask, grad_sink;    /* sizes of mask where it has a stride; [Hq]; written; or none */
} lowbit_attention_backward_args;

/* Attention of few queries over a key-value cache of floats or codes (csrc/ops/decode.hpp). */
typedef struct lowbit_decode_args {
  lowbit_call call;
  lowbit_tensor q, k, v, k_scale, v_scale, out, lse, mask, sink; /* lse, mask, sink, and scales of floats: or none */
  int64_t position, window;
  double scale;
  int32_t causal, rotated;
} lowbit_decode_args;

typedef struct lowbit_kv_quantize_args {
  lowbit_call call;
  lowbit_tensor x, codes, scale; /* codes and scale: written */
  int32_t rotate;
} lowbit_kv_quantize_args;

typedef struct lowbit_kv_dequantize_args {
  lowbit_call call;
  lowbit_tensor codes, scale, x; /* x: written */
  int32_t rotated;
} lowbit_kv_dequantize_args;

typedef struct lowbit_row {
  const char *op;     /* "linear" */
  const char *name;   /* <op>_<what>_<who>: "linear_int8_acme"; no other row has it */
  const char *device; /* the type of device that it runs on */
  size_t args_size;   /* sizeof(lowbit_<op>_args) */
  int32_t first;      /* 0: behind lowbit's rows, taken where it is asked for by name or none of them fits; 1: before */
  /* 0 if the row can run the call, else another number, and why into `reason`. Reads no memory of tensors. NULL: it
   * runs every call. */
  int (*refuses)(const void *args, char *reason, size_t bytes);
  /* 0 if it did, else another number, and why into `error`. */
  int (*run)(const void *args, char *error, size_t bytes);
} lowbit_row;

typedef struct lowbit_rows {
  size_t struct_size; /* sizeof(lowbit_rows) */
  int32_t api_version; /* LOWBIT_BACKEND_API */
  size_t row_size; /* sizeof(lowbit_row) */
  int64_t count;
  const lowbit_row *rows; /* best first; lives as long as the process */
} lowbit_rows;

LOWBIT_BACKEND_EXPORT const lowbit_rows *lowbit_backend_rows(void);

static inline int lowbit_given(const lowbit_tensor *tensor) { return tensor->dtype != LOWBIT_NOT_GIVEN; }

static inline float lowbit_float_of_half(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  uint32_t bits = sign;
  float value;
  if (magnitude >= 0x7c00u) bits |= 0x7f800000u | (magnitude & 0x3ffu) << 13;
  else if (magnitude >= 0x0400u) bits |= (magnitude << 13) + 0x38000000u;
  memcpy(&value, &bits, 4);
  if (magnitude < 0x0400u) value = (sign ? -1.0f : 1.0f) * (float)magnitude / 16777216.0f;
  return value;
}

static inline float lowbit_float_of_bfloat16(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* The code of w[n, k] in LOWBIT_LAYOUT_X86_PANEL_16X64, of an integer or lookup format. */
static inline int lowbit_code(const lowbit_weight *weight, int64_t n, int64_t k) {
  const uint8_t *tile = weight->data + n / weight->columns * weight->row_bytes + weight->codes;
  const int bits = weight->bits;
  const int64_t step = k % 64 / 4, at = n % weight->columns * 4 + k % 4;
  int code = 0, count;
  tile += k / 64 * 128 * bits;
  for (count = 1; count <= bits; count *= 2) { /* pieces of 1, 2, 4 and 8 bits, the smallest first */
    const int before = bits & (count - 1);
    const int64_t lines = 2 * count;
    if (!(bits & count)) continue;
    code |= (tile[before * 128 + step % lines * 64 + at] >> (count * (step / lines)) & ((1 << count) - 1)) << before;
  }
  return code;
}

/* The factor of a code's level in w[n, k], of LOWBIT_LAYOUT_X86_PANEL_16X64. */
static inline float lowbit_scale(const lowbit_weight *weight, int64_t n, int64_t k) {
  const int64_t column = n % weight->columns;
  const uint8_t *row = weight->data + n / weight->columns * weight->row_bytes;
  float scale;
  uint16_t half;
  memcpy(&scale, row + weight->column_scale + column * 4, 4);
  if (weight->group_scale < 0) return scale;
  memcpy(&half, row + weight->group_scale + (k / weight->group_size * weight->columns + column) * 2, 2);
  return scale * lowbit_float_of_half(half);
}

/* The zero point of w[n, k], of an integer format. */
static inline float lowbit_zero(const lowbit_weight *weight, int64_t n, int64_t k) {
  const int64_t group = weight->group_size ? k / weight->group_size : 0;
  const uint8_t *row = weight->data + n / weight->columns * weight->row_bytes;
  uint16_t half;
  if (weight->zero < 0) return (float)(1 << (weight->bits - 1));
  memcpy(&half, row + weight->zero + (group * weight->columns + n % weight->columns) * 2, 2);
  return lowbit_float_of_half(half);
}

#ifdef __cplusplus
}
#endif

#endif
