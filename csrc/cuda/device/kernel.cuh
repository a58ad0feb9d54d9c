// SPDX-License-Identifier: Apache-2.0
// How a kernel is declared. Each takes one struct, which lies in constant memory; the driver finds it by its name.
// Two CTAs of 256 threads or more fit on a multiprocessor: 128 registers a thread.
// And memory that the threads of a CTA share: LOWBIT_SHARED(int32_t, sums, [8]); LOWBIT_DYNAMIC_SHARED(Type, shared) is
// what a launch asks for, where that is more than 48 KB. Tests give each a meaning on the host.
#pragma once

#ifndef LOWBIT_KERNEL
#define LOWBIT_KERNEL(name, threads, Args) \
  extern "C" __global__ void __launch_bounds__(threads, 2) name(const __grid_constant__ Args args)
#define LOWBIT_SHARED(Type, name, extents) __shared__ alignas(16) Type name extents
#define LOWBIT_DYNAMIC_SHARED(Type, name)  \
  extern __shared__ uint4 dynamic_shared[]; \
  auto& name = *reinterpret_cast<Type*>(dynamic_shared)
#endif
