// SPDX-License-Identifier: Apache-2.0
// LOWBIT_ONE_FUNCTION: a function that is neither inlined nor compiled again for some values of its arguments.
#pragma once

#if __has_cpp_attribute(gnu::noclone)
#define LOWBIT_ONE_FUNCTION [[gnu::noinline, gnu::noclone]]
#else  // clang makes no clones
#define LOWBIT_ONE_FUNCTION [[gnu::noinline]]
#endif
