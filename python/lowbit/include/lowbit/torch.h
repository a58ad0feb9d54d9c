/* SPDX-License-Identifier: Apache-2.0 */
/* lowbit in a C++ program that runs a .pt2 with libtorch, without Python. docs/export.md is the guide, examples/cpp a
 * program. */
#ifndef LOWBIT_TORCH_H
#define LOWBIT_TORCH_H

#include <lowbit/lowbit.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the ops lowbit::* to the dispatcher of the libtorch that this program is linked to. To be called before a model
 * is loaded; later calls do nothing. LOWBIT_RUNTIME_ERROR: the ops are not there, for the reason of
 * lowbit_last_error(). */
LOWBIT_EXPORT int lowbit_register_torch(void);

#ifdef __cplusplus
}
#endif

#endif
