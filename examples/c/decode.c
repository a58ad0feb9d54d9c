/* SPDX-License-Identifier: Apache-2.0 */
/* Decodes a Llama model block by block with lowbit's C API alone: no Python, no torch.
 *
 *     decode MODEL COUNT CACHE TOKEN...
 *
 * MODEL is a file of write_model.py, CACHE float, int8 or int4. Prints the COUNT tokens that follow the given ones,
 * each the most probable, then how many a second. */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _WIN32
#include <windows.h>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include <lowbit/lowbit.h>

#define FLOATS(data, ...) LOWBIT_TENSOR((void *)(data), LOWBIT_FLOAT32, __VA_ARGS__)

typedef struct {
  int64_t layers, columns, heads, kv_heads, head_columns, mlp_columns, words, context;
  double eps;
} Sizes; /* in the file */
typedef struct {
  int64_t at, bytes, n, k, group_size, format, asymmetric, layout, x_format;
} Record; /* of a weight in the file */
typedef struct {
  lowbit_packed_weight packed;
  int32_t x_format;
} Weight;
typedef struct {
  Weight q, k, v, o, gate, up, down;
  const float *attention_norm, *mlp_norm;
  void *keys, *values, *key_scales, *value_scales; /* [Hkv, S, columns]; floats have no scales */
} Layer;
typedef struct {
  Sizes sizes;
  Weight table, head;
  Layer *layers;
  const float *cos, *sin, *norm; /* cos, sin: [context, E] */
  int32_t cache, scales;           /* dtypes */
  int64_t cache_columns, groups, capacity;
  /* Between the calls, of the longest step: tokens by columns. */
  float *x, *h, *normed, *part, *qkv, *rotated, *attended, *gate, *up, *keys, *values, *logits;
} Model;
typedef struct {
  Model *model;
  const int64_t *tokens;
  int64_t start, length, next; /* next: written */
} Step;

static void stop(const char *what) {
  fprintf(stderr, "decode: %s\n", what);
  exit(1);
}

static void must(int status) {
  if (status != LOWBIT_OK) stop(lowbit_last_error());
}

static void *room(int64_t count, size_t size) {
  void *memory = calloc((size_t)count, size);
  if (!memory) stop("out of memory");
  return memory;
}

/* ---- The file ---- */

typedef struct {
  char *data;
  int64_t bytes, at;
} File;

#ifdef _WIN32
static File mapped(const char *path) {
  File file = {NULL, 0, 8};
  LARGE_INTEGER bytes;
  const HANDLE opened = CreateFileA(path, GENERIC_READ, FILE_SHARE_READ, NULL, OPEN_EXISTING, 0, NULL);
  if (opened == INVALID_HANDLE_VALUE || !GetFileSizeEx(opened, &bytes)) stop("MODEL cannot be opened");
  const HANDLE mapping = CreateFileMappingA(opened, NULL, PAGE_READONLY, 0, 0, NULL);
  file.bytes = bytes.QuadPart;
  if (mapping) file.data = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
  return file;
}
#else
static File mapped(const char *path) {
  File file = {NULL, 0, 8};
  struct stat facts;
  const int descriptor = open(path, O_RDONLY);
  if (descriptor < 0 || fstat(descriptor, &facts) != 0) stop("MODEL cannot be opened");
  file.bytes = facts.st_size;
  file.data = mmap(NULL, (size_t)file.bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (file.data == MAP_FAILED) file.data = NULL;
  return file;
}
#endif

static File model_file(const char *path) {
  const File file = mapped(path);
  if (!file.data || file.bytes < 8 || memcmp(file.data, "LBLLAMA1", 8) != 0) stop("MODEL must be a file of write_model.py");
  return file;
}

static const void *inside(const File *file, int64_t at, int64_t bytes) {
  if (at < 0 || bytes < 0 || bytes > file->bytes || at > file->bytes - bytes) stop("MODEL is cut");
  return file->data + at;
}

static void take(File *file, void *to, int64_t bytes) {
  memcpy(to, inside(file, file->at, bytes), (size_t)bytes);
  file->at += bytes;
}

static Weight taken_weight(File *file, int64_t n, int64_t k) {
  Record record;
  Weight weight = {{sizeof weight.packed, NULL, 0, 0, 0, 0, 0, 0, 0}, 0};
  take(file, &record, sizeof record);
  if (record.n != n || record.k != k) stop("MODEL has a weight of another shape");
  weight.packed.data = (void *)inside(file, record.at, record.bytes);
  weight.packed.bytes = record.bytes;
  weight.packed.n = record.n, weight.packed.k = record.k, weight.packed.group_size = record.group_size;
  weight.packed.format = (int32_t)record.format, weight.packed.asymmetric = (int32_t)record.asymmetric;
  weight.packed.layout = (int32_t)record.layout;
  weight.x_format = (int32_t)record.x_format;
  return weight;
}

static const float *taken_vector(File *file, int64_t count) {
  int64_t record[2];
  take(file, record, sizeof record);
  if (record[1] != count * (int64_t)sizeof(float)) stop("MODEL has a vector of another length");
  return inside(file, record[0], record[1]);
}

static void read_model(Model *model, const char *path) {
  File file = model_file(path);
  Sizes *sizes = &model->sizes;
  int64_t i, c, m, q, kv;
  take(&file, sizes, sizeof *sizes);
  const int64_t all[] = {sizes->layers, sizes->columns, sizes->heads, sizes->kv_heads, sizes->head_columns,
                         sizes->mlp_columns, sizes->words, sizes->context};
  for (i = 0; i < (int64_t)(sizeof all / sizeof *all); i++) /* products of two do not overflow */
    if (all[i] < 1 || all[i] > INT32_MAX) stop("MODEL has a size that is not 1 to 2^31 - 1");
  c = sizes->columns, m = sizes->mlp_columns;
  q = sizes->heads * sizes->head_columns, kv = sizes->kv_heads * sizes->head_columns;
  model->layers = room(sizes->layers, sizeof(Layer));
  model->table = taken_weight(&file, sizes->words, c);
  for (i = 0; i < sizes->layers; i++) {
    Layer *layer = &model->layers[i];
    layer->q = taken_weight(&file, q, c), layer->k = taken_weight(&file, kv, c), layer->v = taken_weight(&file, kv, c);
    layer->o = taken_weight(&file, c, q);
    layer->gate = taken_weight(&file, m, c), layer->up = taken_weight(&file, m, c);
    layer->down = taken_weight(&file, c, m);
  }
  model->head = taken_weight(&file, sizes->words, c);
  model->cos = taken_vector(&file, sizes->context * sizes->head_columns);
  model->sin = taken_vector(&file, sizes->context * sizes->head_columns);
  for (i = 0; i < sizes->layers; i++) {
    model->layers[i].attention_norm = taken_vector(&file, sizes->columns);
    model->layers[i].mlp_norm = taken_vector(&file, sizes->columns);
  }
  model->norm = taken_vector(&file, sizes->columns);
}

/* Room for the cache of `capacity` tokens, and for steps of up to `length`. */
static void make_room(Model *model, const char *cache, int64_t capacity, int64_t length) {
  const Sizes *s = &model->sizes;
  const int64_t e = s->head_columns, q = s->heads * e, kv = s->kv_heads * e, widest = q > kv ? q : kv;
  size_t element = sizeof(float), scale = sizeof(float);
  int64_t i;
  model->cache = LOWBIT_FLOAT32, model->scales = LOWBIT_FLOAT32;
  model->cache_columns = e, model->groups = 0, model->capacity = capacity;
  if (strcmp(cache, "float") != 0) {
    const int int4 = strcmp(cache, "int4") == 0;
    if (!int4 && strcmp(cache, "int8") != 0) stop("CACHE must be float, int8 or int4");
    model->cache = int4 ? LOWBIT_UINT8 : LOWBIT_INT8, model->scales = int4 ? LOWBIT_FLOAT16 : LOWBIT_FLOAT32;
    element = 1, scale = int4 ? 2 : 4;
    must(lowbit_kv_sizes(model->cache, e, &model->cache_columns, &model->groups));
  }
  for (i = 0; i < s->layers; i++) {
    Layer *layer = &model->layers[i];
    const int64_t rows = s->kv_heads * capacity, codes = rows * model->cache_columns, scales = rows * model->groups + 1;
    layer->keys = room(codes, element), layer->values = room(codes, element);
    layer->key_scales = room(scales, scale), layer->value_scales = room(scales, scale);
  }
#define ROOM(name, columns) model->name = room(length * (columns), sizeof(float))
  ROOM(x, s->columns), ROOM(h, s->columns), ROOM(normed, s->columns), ROOM(part, widest), ROOM(qkv, q + 2 * kv);
  ROOM(rotated, q), ROOM(attended, q), ROOM(gate, s->mlp_columns), ROOM(up, s->mlp_columns);
  ROOM(keys, kv), ROOM(values, kv);
#undef ROOM
  model->logits = room(s->words, sizeof(float));
}

/* ---- One step ---- */

static void linear(const Weight *weight, const float *x, int64_t m, float *y, lowbit_linear_options options) {
  options.struct_size = sizeof options, options.x_format = weight->x_format;
  must(lowbit_linear(&FLOATS(x, m, weight->packed.k), &weight->packed, &FLOATS(y, m, weight->packed.n), &options));
}

static void norm(const Model *model, const float *weight, const float *x, int64_t m, float *y) {
  const int64_t k = model->sizes.columns;
  must(lowbit_rms_norm(&FLOATS(x, m, k), &FLOATS(weight, k), model->sizes.eps, &FLOATS(y, m, k), NULL));
}

typedef struct {
  int64_t shape[4], stride[4];
  lowbit_tensor tensor;
} Part;

/* Tokens begin to end of [Hkv, S, columns]. */
static const lowbit_tensor *part_of(Part *part, const Model *model, void *data, int32_t dtype, int64_t columns,
                                    int64_t begin, int64_t end) {
  const int64_t bytes = dtype == LOWBIT_FLOAT32 ? 4 : dtype == LOWBIT_FLOAT16 ? 2 : 1;
  const Part made = {{1, model->sizes.kv_heads, end - begin, columns},
                     {0, model->capacity * columns, columns, 1},
                     {(char *)data + begin * columns * bytes, part->shape, part->stride, 4, dtype}};
  *part = made;
  return &part->tensor;
}

/* A prompt attends to its own keys and values in float, a token to the cache. */
static void attend(const Model *model, const Layer *layer, int64_t start, int64_t m) {
  const int64_t e = model->sizes.head_columns, heads = model->sizes.heads, kv_heads = model->sizes.kv_heads;
  const int64_t out_shape[] = {1, heads, m, e}, out_stride[] = {0, e, heads * e, 1}, end = start + m;
  const int64_t columns = model->cache_columns, groups = model->groups;
  const lowbit_tensor qkv = FLOATS(model->qkv, 1, m, heads + 2 * kv_heads, e);
  const lowbit_tensor cos = FLOATS(model->cos + start * e, 1, m, e), sin = FLOATS(model->sin + start * e, 1, m, e);
  const lowbit_tensor q = FLOATS(model->rotated, 1, heads, m, e);
  const lowbit_tensor out = {model->attended, out_shape, out_stride, 4, LOWBIT_FLOAT32};
  const lowbit_attention_options over_floats = {.struct_size = sizeof over_floats, .causal = start == 0};
  Part k, v, k_scale, v_scale, codes, scales;
  part_of(&k, model, layer->keys, model->cache, columns, 0, end);
  part_of(&v, model, layer->values, model->cache, columns, 0, end);
  if (model->cache == LOWBIT_FLOAT32) {
    must(lowbit_rope_append(&qkv, &cos, &sin, start, &k.tensor, &v.tensor, &q, NULL));
    must(lowbit_attention_forward(&q, &k.tensor, &v.tensor, &out, &over_floats));
  } else {
    const int rotate = model->cache == LOWBIT_UINT8;
    const lowbit_tensor keys = FLOATS(model->keys, 1, kv_heads, m, e);
    const lowbit_tensor values = FLOATS(model->values, 1, kv_heads, m, e);
    const lowbit_decode_options over_codes = {.struct_size = sizeof over_codes, .k_scale = &k_scale.tensor,
                                              .v_scale = &v_scale.tensor, .rotated = rotate, .causal = 1};
    part_of(&k_scale, model, layer->key_scales, model->scales, groups, 0, end);
    part_of(&v_scale, model, layer->value_scales, model->scales, groups, 0, end);
    must(lowbit_rope_append(&qkv, &cos, &sin, 0, &keys, &values, &q, NULL));
    must(lowbit_kv_quantize(&keys, part_of(&codes, model, layer->keys, model->cache, columns, start, end),
                            part_of(&scales, model, layer->key_scales, model->scales, groups, start, end), rotate));
    must(lowbit_kv_quantize(&values, part_of(&codes, model, layer->values, model->cache, columns, start, end),
                            part_of(&scales, model, layer->value_scales, model->scales, groups, start, end), 0));
    must(start == 0 ? lowbit_attention_forward(&q, &keys, &values, &out, &over_floats)
                    : lowbit_decode(&q, &k.tensor, &v.tensor, &out, &over_codes));
  }
}

/* x = x + o(attention(norm(x))); x = x + down(silu(gate(norm(x))) * up(norm(x))) */
static void block(const Model *model, const Layer *layer, int64_t start, int64_t m) {
  const Sizes *s = &model->sizes;
  const lowbit_tensor x = FLOATS(model->x, m, s->columns), h = FLOATS(model->h, m, s->columns);
  const lowbit_tensor gate = FLOATS(model->gate, m, s->mlp_columns);
  const lowbit_linear_options plain = {0}, silu = {.activation = LOWBIT_ACTIVATION_SILU}, add_x = {.add = &x},
                              add_h = {.add = &h}, gated = {.mul = &gate};
  const Weight *const projections[] = {&layer->q, &layer->k, &layer->v};
  int64_t i, row, at = 0, width = layer->q.packed.n + layer->k.packed.n + layer->v.packed.n;
  norm(model, layer->attention_norm, model->x, m, model->normed);
  for (i = 0; i < 3; at += projections[i++]->packed.n) { /* side by side in each row */
    const int64_t n = projections[i]->packed.n;
    linear(projections[i], model->normed, m, model->part, plain);
    for (row = 0; row < m; row++)
      memcpy(model->qkv + row * width + at, model->part + row * n, (size_t)n * sizeof(float));
  }
  attend(model, layer, start, m);
  linear(&layer->o, model->attended, m, model->h, add_x);
  norm(model, layer->mlp_norm, model->h, m, model->normed);
  linear(&layer->gate, model->normed, m, model->gate, silu);
  linear(&layer->up, model->normed, m, model->up, gated);
  linear(&layer->down, model->up, m, model->x, add_h);
}

static void run_step(void *context) {
  Step *step = context;
  Model *model = step->model;
  const Sizes *s = &model->sizes;
  const int64_t m = step->length;
  int64_t i;
  must(lowbit_embedding(&model->table.packed, &LOWBIT_TENSOR((void *)step->tokens, LOWBIT_INT64, m),
                        &FLOATS(model->x, m, s->columns)));
  for (i = 0; i < s->layers; i++) block(model, &model->layers[i], step->start, m);
  norm(model, model->norm, model->x + (m - 1) * s->columns, 1, model->normed);
  linear(&model->head, model->normed, 1, model->logits, (lowbit_linear_options){0});
  for (i = 1, step->next = 0; i < s->words; i++)
    if (model->logits[i] > model->logits[step->next]) step->next = i;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int64_t number(const char *text) {
  char *end;
  const long long value = strtoll(text, &end, 10);
  if (*text == 0 || *end != 0 || value < 0) stop("COUNT and TOKEN must be numbers");
  return value;
}

int main(int count, char **arguments) {
  if (count < 5) stop("decode MODEL COUNT CACHE TOKEN...");
  Model model = {0};
  const int64_t prompt = count - 4, wanted = number(arguments[2]);
  int64_t *tokens = room(prompt, sizeof *tokens), i;
  if (lowbit_api_version() < LOWBIT_API_VERSION) stop("liblowbit is older than the program");
  for (i = 0; i < prompt; i++) tokens[i] = number(arguments[4 + i]);
  read_model(&model, arguments[1]);
  if (prompt + wanted > model.sizes.context) stop("more tokens than the file has positions: write_model.py --context");
  make_room(&model, arguments[3], prompt + wanted, prompt);
  Step step = {&model, tokens, 0, prompt, 0};
  const double begin = seconds();
  double first = begin;
  for (i = 0; i < wanted; i++) {
    must(lowbit_as_team(run_step, &step)); /* many short calls: the threads stay awake */
    if (i == 0) first = seconds();
    printf("%s%lld", i ? " " : "", (long long)step.next);
    fflush(stdout);
    tokens[0] = step.next, step.start += step.length, step.length = 1;
  }
  printf("\nprompt of %lld: %.0f ms; %.1f tokens/s on %d threads\n", (long long)prompt, 1e3 * (first - begin),
         (double)(wanted - 1) / (seconds() - first), lowbit_num_threads());
  return 0;
}
