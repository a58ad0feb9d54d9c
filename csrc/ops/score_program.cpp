// SPDX-License-Identifier: Apache-2.0
#include "ops/score_program.hpp"

namespace lowbit {
Call describe(const ScoreProgramArgs& args) {
  const int64_t bytes = int64_t{args.rows} * args.cols * static_cast<int64_t>(size_of(args.dtype));
  Call call{.read = args.gradient ? 2 * bytes : bytes, .written = bytes};
  call.add(args.dtype, {args.rows, args.cols});
  return call;
}

}  // namespace lowbit
