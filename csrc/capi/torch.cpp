// SPDX-License-Identifier: Apache-2.0
// Registration of the ops, for C++ programs with libtorch.
#include "lowbit/torch.h"

#include "capi/call.hpp"
#include "core/error.hpp"
#include "torch/registration.hpp"

extern "C" int lowbit_register_torch() {
  return lowbit::capi::status_of([] {
    for (const lowbit::torch::Registration& done : lowbit::torch::register_ops({}))
      lowbit::check(!done.how.empty(), lowbit::ErrorKind::runtime, done.op, ": ", done.reason);
  });
}
