/* SPDX-License-Identifier: Apache-2.0 */
/* A program without Python and torch: packs a weight, multiplies, attends over floats and over int8 codes, with 1 and 3
 * threads, as a team, from two threads at once and in a child; writes the results for test_c_program.py. Errors end it with a line of the source. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <lowbit/backend.h>
#include <lowbit/lowbit.h>

#define CHECK(condition)                                                                    \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      printf("line %d: %s: %s\n", __LINE__, #condition, lowbit_last_error());               \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)
#define FLOATS(data, ...) LOWBIT_TENSOR(data, LOWBIT_FLOAT32, __VA_ARGS__)

enum { M = 33, N = 256, K = 192, HEADS = 4, KV_HEADS = 2, L = 5, S = 40, E = 64 };

static float numbers[M * K + N * K + HEADS * L * E + 2 * KV_HEADS * S * E];
static float y[3][M * N], attended[HEADS * L * E], decoded[HEADS * L * E];
static lowbit_packed_weight weight = {sizeof weight, NULL, 0, N, K, 32, 0, 0, 0};

static void multiply(void *result) {
  const lowbit_linear_options options = {.struct_size = sizeof options, .x_format = LOWBIT_X_INT8_GROUP,
                                         .activation = LOWBIT_ACTIVATION_GELU};
  CHECK(lowbit_linear(&FLOATS(numbers, M, K), &weight, &FLOATS(result, M, N), &options) == LOWBIT_OK);
}

static void as_any_number_of_threads(void) {
  CHECK(lowbit_set_num_threads(1) == LOWBIT_OK && lowbit_num_threads() == 1);
  multiply(y[0]);
  CHECK(lowbit_set_num_threads(3) == LOWBIT_OK && lowbit_num_threads() == 3);
  multiply(y[1]);
  CHECK(memcmp(y[0], y[1], sizeof y[0]) == 0);
  memset(y[1], 0, sizeof y[1]);
  CHECK(lowbit_as_team(multiply, y[1]) == LOWBIT_OK);
  CHECK(memcmp(y[0], y[1], sizeof y[0]) == 0);
}

static void *in_a_thread(void *result) {
  int i;
  for (i = 0; i < 50; i++) multiply(result);
  CHECK(lowbit_dequantize(&weight, NULL) == LOWBIT_VALUE_ERROR); /* this thread's error alone */
  return NULL;
}

static void in_two_threads(void) {
  pthread_t threads[2];
  int i;
  for (i = 0; i < 2; i++) memset(y[i + 1], 0, sizeof y[0]);
  for (i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, in_a_thread, y[i + 1]) == 0);
  for (i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0 && memcmp(y[0], y[i + 1], sizeof y[0]) == 0);
  CHECK(strcmp(lowbit_last_error(), "") == 0);
}

#ifdef _WIN32 /* which has no fork */
static void in_a_child(void) {}
#else
static void in_a_child(void) {
  int status = -1;
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK(lowbit_num_threads() == 3);
    memset(y[1], 0, sizeof y[1]);
    multiply(y[1]);
    _exit(memcmp(y[0], y[1], sizeof y[0]) == 0 ? 0 : 1);
  }
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}
#endif

static void attend(void) {
  float *q = numbers + M * K + N * K, *k = q + HEADS * L * E, *v = k + KV_HEADS * S * E, *rows[] = {k, v};
  const lowbit_tensor query = FLOATS(q, 1, HEADS, L, E), key = FLOATS(k, 1, KV_HEADS, S, E), value = FLOATS(v, 1, KV_HEADS, S, E);
  int8_t codes[2][KV_HEADS * S * E];
  float scales[2][KV_HEADS * S];
  lowbit_decode_options options = {.struct_size = sizeof options, .causal = 1};
  lowbit_tensor packed[2], scale[2];
  int64_t row_bytes, groups;
  int i;
  CHECK(lowbit_attention_forward(&query, &key, &value, &FLOATS(attended, 1, HEADS, L, E), NULL) == LOWBIT_OK);
  CHECK(lowbit_kv_sizes(LOWBIT_INT8, E, &row_bytes, &groups) == LOWBIT_OK && row_bytes == E && groups == 1);
  const int64_t code_shape[] = {1, KV_HEADS, S, E}, scale_shape[] = {1, KV_HEADS, S, 1};
  for (i = 0; i < 2; i++) {
    const lowbit_tensor code = {codes[i], code_shape, NULL, 4, LOWBIT_INT8}, step = {scales[i], scale_shape, NULL, 4, LOWBIT_FLOAT32};
    packed[i] = code, scale[i] = step;
    CHECK(lowbit_kv_quantize(&FLOATS(rows[i], 1, KV_HEADS, S, E), &packed[i], &scale[i], 0) == LOWBIT_OK);
  }
  options.k_scale = &scale[0], options.v_scale = &scale[1];
  CHECK(lowbit_decode(&query, &packed[0], &packed[1], &FLOATS(decoded, 1, HEADS, L, E), &options) == LOWBIT_OK);
}

int main(int count, char **arguments) {
  const lowbit_quantize_options search = {.struct_size = sizeof search, .scale_choice = LOWBIT_SCALE_SEARCH};
  FILE *file;
  CHECK(count == 3 && lowbit_api_version() == LOWBIT_API_VERSION && strcmp(lowbit_last_error(), "") == 0);
  file = fopen(arguments[1], "rb");
  CHECK(file && fread(numbers, sizeof numbers, 1, file) == 1 && fclose(file) == 0);
  CHECK(lowbit_find_format("int4", &weight.format) == LOWBIT_OK && weight.format == LOWBIT_FORMAT_INT4);
  CHECK(lowbit_packed_bytes(&weight, &weight.bytes) == LOWBIT_OK);
  weight.data = calloc(1, (size_t)weight.bytes);
  CHECK(lowbit_quantize(&FLOATS(numbers + M * K, N, K), &weight, &search) == LOWBIT_OK);
  as_any_number_of_threads();
  in_two_threads();
  in_a_child();
  attend();
  CHECK(lowbit_set_num_threads(0) == LOWBIT_OK && lowbit_num_threads() == 2); /* OMP_NUM_THREADS of the test */
  CHECK(lowbit_dequantize(&weight, NULL) == LOWBIT_VALUE_ERROR);
  CHECK(strcmp(lowbit_last_error(), "dequantize: out must be given, got none") == 0);
  file = fopen(arguments[2], "wb");
  CHECK(file && fwrite(weight.data, (size_t)weight.bytes, 1, file) == 1 && fwrite(y[0], sizeof y[0], 1, file) == 1);
  CHECK(fwrite(attended, sizeof attended, 1, file) == 1 && fwrite(decoded, sizeof decoded, 1, file) == 1 && fclose(file) == 0);
  return 0;
}
