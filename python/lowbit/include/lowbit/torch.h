/* SPDX-License-Identifier: Apache-2.0 */
/* lowbit in a C++ program that runs a .pt2 with libtorch, without Python; exported by liblowbit.so. docs/export.md is the
 * guide, examples/cpp a program. */
#ifndef LOWBIT_TORCH_H
#define LOWBIT_TORCH_H

#ifdef __cplusplus
extern "C" {
#endif

/* Gives the ops lowbit::* to the dispatcher of the libtorch that this program is linked to. Call it before a model is
 * loaded; later calls do nothing. Returns NULL, or a text that says why the ops are not there. */
__attribute__((visibility("default"))) const char *lowbit_register_torch(void);

#ifdef __cplusplus
}
#endif

#endif
