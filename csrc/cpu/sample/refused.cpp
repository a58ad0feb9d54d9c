// SPDX-License-Identifier: Apache-2.0
#include "cpu/sample/refused.hpp"

#include "core/error.hpp"

namespace lowbit::cpu {

void refuse_id(const SampleArgs& args, int64_t row, int64_t at, int64_t id) {
  throw Error(ErrorKind::value, concat("sample: ids must be 0 to ", args.logits.size(1) - 1, ", or -1 for none, got ",
                                       "ids[", row, ", ", at, "] = ", id));
}

void refuse_logits(int64_t row, bool has_nan, float most) {
  const char* const got = has_nan ? "nan" : most > 0 ? "inf" : "nothing but -inf";
  throw Error(ErrorKind::value, concat("sample: each row of logits must have a finite largest number and no nan, got ",
                                       got, " in row ", row));
}

}  // namespace lowbit::cpu
