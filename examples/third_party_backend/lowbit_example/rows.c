/* SPDX-License-Identifier: Apache-2.0 */
/* A row of `linear` for the CPU: float32 activations times an int8 weight, as lowbit packs it, plus a bias. It is
 * written to be read. A column of the weight is decoded once and then multiplied with every row of x. */
#include <lowbit/backend.h>

#include <stdio.h>
#include <stdlib.h>

static int refuses(const void *args, char *reason, size_t bytes) {
  const lowbit_linear_args *a = args;
  const char *why = NULL;
  if (a->weight.format != LOWBIT_FORMAT_INT8) why = "the weight is not int8";
  else if (a->x_format != LOWBIT_X_FLOAT) why = "activations enter as codes";
  else if (a->x.dtype != LOWBIT_FLOAT32) why = "x is not float32";
  else if (lowbit_given(&a->bias) && a->bias.dtype != LOWBIT_FLOAT32) why = "bias is not float32";
  else if (a->activation != LOWBIT_ACTIVATION_NONE || lowbit_given(&a->mul) || lowbit_given(&a->add))
    why = "nothing but a bias may follow the product";
  if (why) snprintf(reason, bytes, "%s", why);
  return why != NULL;
}

static int run(const void *args, char *error, size_t bytes) {
  const lowbit_linear_args *a = args;
  const lowbit_weight *w = &a->weight;
  const int64_t m = a->x.shape[0];
  const float *x = a->x.data, *bias = lowbit_given(&a->bias) ? a->bias.data : NULL;
  float *y = a->y.data;
  int64_t i, n, k;
  float *column = malloc((size_t)w->k * sizeof *column);
  if (!column) {
    snprintf(error, bytes, "no memory for a column of %lld values", (long long)w->k);
    return 1;
  }
  for (n = 0; n < w->n; n++) {
    for (k = 0; k < w->k; k++)
      column[k] = lowbit_scale(w, n, k) * ((float)lowbit_code(w, n, k) - lowbit_zero(w, n, k));
    for (i = 0; i < m; i++) {
      double sum = bias ? bias[n] : 0;
      for (k = 0; k < w->k; k++) sum += (double)x[i * w->k + k] * column[k];
      y[i * w->n + n] = (float)sum;
    }
  }
  free(column);
  return 0;
}

static const lowbit_row rows[] = {
    {"linear", "linear_int8_example", "cpu", sizeof(lowbit_linear_args), 0, refuses, run},
};

LOWBIT_BACKEND_EXPORT const lowbit_rows *lowbit_backend_rows(void) {
  static const lowbit_rows table = {sizeof(lowbit_rows), LOWBIT_BACKEND_API, sizeof(lowbit_row),
                                    sizeof rows / sizeof *rows, rows};
  return &table;
}
