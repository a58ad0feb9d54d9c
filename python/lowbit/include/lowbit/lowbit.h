/* SPDX-License-Identifier: Apache-2.0 */
/* lowbit for C and C++ programs, without Python and torch: C99, exported by liblowbit.so. docs/c_api.md is the guide,
 * examples/c a program.
 *
 * - Functions return LOWBIT_OK, or another lowbit_status and a text in lowbit_last_error(), unless they say otherwise.
 *   Arguments are checked before anything is written.
 * - Memory is the caller's and lies on the host. No pointer is kept after a call returned; there is nothing to free.
 * - Structs with struct_size may grow at their end: set it to sizeof, and all that you do not use to 0. `options` may
 *   be NULL, which is a struct of zeros; so may tensors in it, which are then not given.
 * - Any thread may call any function.
 *
 * In shapes: B batch, L tokens of a query, S tokens of keys, Hq and Hkv heads (Hq a multiple of Hkv), E and Ev columns
 * of a head. "float" is float32, bfloat16 or float16. Tensors are contiguous where no strides are allowed. */
#ifndef LOWBIT_LOWBIT_H
#define LOWBIT_LOWBIT_H

#include <lowbit/types.h>

/* Counted up when something is added. A program works with libraries of its own version and later ones. */
#define LOWBIT_API_VERSION 1

#if defined(_WIN32) && defined(lowbit_EXPORTS) /* the library itself, whose linker exports all names */
#define LOWBIT_EXPORT
#elif defined(_WIN32)
#define LOWBIT_EXPORT __declspec(dllimport)
#else
#define LOWBIT_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum lowbit_status {
  LOWBIT_OK, LOWBIT_VALUE_ERROR, LOWBIT_TYPE_ERROR, LOWBIT_INDEX_ERROR, LOWBIT_NOT_IMPLEMENTED, LOWBIT_RUNTIME_ERROR,
  LOWBIT_OUT_OF_MEMORY
};

/* LOWBIT_API_VERSION of the library. */
LOWBIT_EXPORT int lowbit_api_version(void);
/* The text of the last error of this thread, valid until the next one; "" before the first. */
LOWBIT_EXPORT const char *lowbit_last_error(void);

/* The number of threads of calls: OMP_NUM_THREADS, else the cores of the process, until set to 1..1024; 0: as at the
 * beginning. Where torch is in the process they are torch's, and setting them is a LOWBIT_RUNTIME_ERROR. */
LOWBIT_EXPORT int lowbit_num_threads(void); /* returns it */
LOWBIT_EXPORT int lowbit_set_num_threads(int threads);
/* Calls body(context). Threads stay awake between its calls of lowbit: for many short ones, as of one token. */
LOWBIT_EXPORT int lowbit_as_team(void (*body)(void *context), void *context);

#if !defined(__cplusplus)
/* A contiguous tensor: LOWBIT_TENSOR(x, LOWBIT_FLOAT32, m, k). It lives as long as the block around it. */
#define LOWBIT_TENSOR(data, dtype, ...)                                            \
  ((const lowbit_tensor){(data), (const int64_t[]){__VA_ARGS__}, NULL,             \
                         (int32_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (dtype)})
#endif

/* ---- Weights: packed once, by lowbit_quantize or by Python; the bytes are the same. ---- */

typedef struct lowbit_packed_weight {
  size_t struct_size;
  void *data;
  int64_t bytes;            /* of data, as lowbit_packed_bytes says */
  int64_t n, k, group_size; /* weights along k that share a scale: 16, 32, 64, 128 or 256; 0: one scale per column n */
  int32_t format, asymmetric, layout;
} lowbit_packed_weight;

/* The number of a format: "int4". */
LOWBIT_EXPORT int lowbit_find_format(const char *name, int32_t *format);
/* The bytes of a weight; data and bytes are not read. */
LOWBIT_EXPORT int lowbit_packed_bytes(const lowbit_packed_weight *weight, int64_t *bytes);

typedef struct lowbit_quantize_options {
  size_t struct_size;
  int32_t mapping;      /* enum lowbit_mapping; asymmetric weights need LOWBIT_MAPPING_ASYMMETRIC */
  int32_t scale_choice; /* enum lowbit_scale_choice; Python takes search for integers of 4 bits or fewer */
  const lowbit_tensor *importance; /* float32 [k]: how much an error at each k counts in a search */
} lowbit_quantize_options;

/* weight: float [n, k], finite. packed: its data is written, but for the bytes between sections. */
LOWBIT_EXPORT int lowbit_quantize(const lowbit_tensor *weight, const lowbit_packed_weight *packed,
                                  const lowbit_quantize_options *options);
/* out: float32 [n, k] */
LOWBIT_EXPORT int lowbit_dequantize(const lowbit_packed_weight *weight, const lowbit_tensor *out);
/* Writes the weight `from` into the data of `to`, which has the other layout. */
LOWBIT_EXPORT int lowbit_repack(const lowbit_packed_weight *from, const lowbit_packed_weight *to);
/* out[i] = w[indices[i]]: indices int32 or int64 [...], out float [..., k]. Weights of any layout. */
LOWBIT_EXPORT int lowbit_embedding(const lowbit_packed_weight *weight, const lowbit_tensor *indices,
                                   const lowbit_tensor *out);

typedef struct lowbit_linear_options {
  size_t struct_size;
  int32_t x_format, activation; /* enum lowbit_x_format, enum lowbit_activation */
  const lowbit_tensor *bias;    /* float [n] */
  const lowbit_tensor *mul;     /* shape and dtype of y */
  const lowbit_tensor *add;     /* shape and dtype of y */
} lowbit_linear_options;

/* y = activation(x @ w.T + bias) * mul + add. x: float [..., k]; y: [..., n], dtype of x. */
LOWBIT_EXPORT int lowbit_linear(const lowbit_tensor *x, const lowbit_packed_weight *weight, const lowbit_tensor *y,
                                const lowbit_linear_options *options);

typedef struct lowbit_experts_options {
  size_t struct_size;
  int32_t gate_up_x_format, down_x_format; /* enum lowbit_x_format */
  int32_t activation;                      /* of the gate: enum lowbit_activation */
  int32_t no_gate;                         /* gate_up is the gate alone, and nothing is multiplied by it */
  int32_t interleaved;                     /* rows of gate_up are gate, up, gate, up ..; 0: all gates, then all ups */
  double alpha;                            /* silu is gate * sigmoid(alpha * gate); 0: 1 */
  double limit, up_offset; /* act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset); limit 0: none */
  const lowbit_tensor *gate_up_bias, *down_bias; /* float [E, n] of each */
} lowbit_experts_options;

/* A mixture of experts: y[t] = sum over j of weights[t, j] * (act(gate) * up) @ down_e.T, with e = index[t, j], and gate
 * and up the halves of x[t] @ gate_up_e.T. x: float [T, H]; index: int32 or int64 [T, k], where E stands for no expert;
 * weights: float [T, k]; y: [T, n of down], dtype of x. gate_up [2 I, H] and down [n, I] describe the weight of one
 * expert; data holds those of E experts, one behind another, and bytes E times lowbit_packed_bytes. */
LOWBIT_EXPORT int lowbit_experts(const lowbit_tensor *x, const lowbit_packed_weight *gate_up,
                                 const lowbit_packed_weight *down, const lowbit_tensor *index,
                                 const lowbit_tensor *weights, const lowbit_tensor *y,
                                 const lowbit_experts_options *options);

/* ---- Attention; the last dimension is dense, the others have any strides. ---- */

typedef struct lowbit_attention_options {
  size_t struct_size;
  double scale;              /* 0: 1 / sqrt(E) */
  int32_t causal;            /* query i sees keys 0..i */
  const lowbit_tensor *mask; /* bool (seen) or float (added) [B, Hq, L, S], any strides; a size of 1 is stretched */
  const lowbit_tensor *sink; /* float32 [Hq]: a score without a value */
  const lowbit_tensor *lse;  /* float32 [B, Hq, L]: written, the log of the sum of exp of the scores */
} lowbit_attention_options;

/* out = softmax(scale * query key^T + mask) value. query: [B, Hq, L, E], key: [B, Hkv, S, E], value: [B, Hkv, S, Ev],
 * out: [B, Hq, L, Ev], of one dtype: float, or float64, whose sink and lse are float64. */
LOWBIT_EXPORT int lowbit_attention_forward(const lowbit_tensor *query, const lowbit_tensor *key,
                                           const lowbit_tensor *value, const lowbit_tensor *out,
                                           const lowbit_attention_options *options);

/* Keys and values as codes. dtype LOWBIT_INT8: int8, one scale per row; LOWBIT_UINT8: int4, two in a byte, one scale
 * per 32 columns. A row of `columns` values has row_bytes bytes of codes and `groups` scales, float32 or float16. */
LOWBIT_EXPORT int lowbit_kv_sizes(int32_t dtype, int64_t columns, int64_t *row_bytes, int64_t *groups);
/* x: float [B, H, L, E]; codes: [B, H, L, row_bytes], scale: [B, H, L, groups], both written: a part of a cache has its
 * strides. rotate: by a Hadamard matrix, for keys in 4 bits. */
LOWBIT_EXPORT int lowbit_kv_quantize(const lowbit_tensor *x, const lowbit_tensor *codes, const lowbit_tensor *scale,
                                     int32_t rotate);
LOWBIT_EXPORT int lowbit_kv_dequantize(const lowbit_tensor *codes, const lowbit_tensor *scale, const lowbit_tensor *x,
                                       int32_t rotated);

typedef struct lowbit_decode_options {
  size_t struct_size;
  double scale;                           /* 0: 1 / sqrt(E) */
  const lowbit_tensor *k_scale, *v_scale; /* of codes: [B, Hkv, S, groups] */
  int32_t rotated;                        /* keys were quantized with rotate */
  int32_t causal;                         /* query i, which is token S - L + i, sees no token behind it */
  int64_t window;                         /* > 0: nor one that is `window` or more before it */
  const lowbit_tensor *mask, *sink;       /* as of lowbit_attention_options */
} lowbit_decode_options;

/* Attention over a cache. query: float [B, Hq, L, E], few of them (L * Hq / Hkv <= 16) over floats; key: [B, Hkv, S, E]
 * float, or codes; value: [B, Hkv, S, Ev] likewise; out: [B, Hq, L, Ev], dtype of query. */
LOWBIT_EXPORT int lowbit_decode(const lowbit_tensor *query, const lowbit_tensor *key, const lowbit_tensor *value,
                                const lowbit_tensor *out, const lowbit_decode_options *options);

/* ---- Between the products of a decoder ---- */

typedef struct lowbit_rms_norm_options {
  size_t struct_size;
  double offset;            /* 1 for weights that are stored around 0 (Gemma) */
  const lowbit_tensor *add; /* shape and dtype of x */
} lowbit_rms_norm_options;

/* y = x / sqrt(mean(x^2) + eps) * (offset + weight) + add. x: float [..., n]; weight: float [n]; y: as x. */
LOWBIT_EXPORT int lowbit_rms_norm(const lowbit_tensor *x, const lowbit_tensor *weight, double eps,
                                  const lowbit_tensor *y, const lowbit_rms_norm_options *options);

typedef struct lowbit_rope_append_options {
  size_t struct_size;
  const lowbit_tensor *q_weight, *k_weight; /* float [E]: heads are normalized before */
  double eps, offset;                       /* of these norms */
} lowbit_rope_append_options;

/* Rotary embedding of new queries and keys; writes keys and values of tokens start to start + L of a cache.
 * qkv: float [B, L, Hq + 2 Hkv, E], last dimension dense; cos, sin: float [B or 1, L, R], R even and at most E; keys,
 * values: [B, Hkv, S, E], last dimension dense: written; rotated: the queries [B, Hq, L, E]: written. */
LOWBIT_EXPORT int lowbit_rope_append(const lowbit_tensor *qkv, const lowbit_tensor *cos, const lowbit_tensor *sin,
                                     int64_t start, const lowbit_tensor *keys, const lowbit_tensor *values,
                                     const lowbit_tensor *rotated, const lowbit_rope_append_options *options);

#ifdef __cplusplus
}
#endif

#endif
