// SPDX-License-Identifier: Apache-2.0
#include "ops/sample.hpp"

#include <cmath>

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

SampleArgs sample_args(const SampleArgs& given) {
  constexpr std::string_view op = "sample";
  SampleArgs args = given;
  const TensorView &logits = args.logits, &ids = args.ids;
  args.place = place_of(op, {{"logits", logits}, {"ids", ids}});
  check_activation(op, "logits", logits);
  check(logits.rank == 2 && logits.size(1) >= 1, value, op, ": logits must have shape [B, V], V at least 1, got ",
        shape_text(logits));
  check_contiguous(op, "logits", logits);
  if (ids) {
    check(ids.dtype == DType::int32 || ids.dtype == DType::int64, type, op, ": ids must be int32 or int64, got ",
          name_of(ids.dtype));
    check(ids.rank == 2 && ids.size(0) == logits.size(0), value, op, ": ids must have shape [B, L], B = ",
          logits.size(0), ", got ", shape_text(ids));
    check_contiguous(op, "ids", ids);
  }
  check(std::isfinite(args.temperature) && args.temperature >= 0, value, op,
        ": temperature must be finite and not negative, got ", args.temperature);
  check(args.top_k >= 0, value, op, ": top_k must not be negative, got ", args.top_k);
  check(args.top_p >= 0 && args.top_p <= 1, value, op, ": top_p must be 0 to 1, got ", args.top_p);
  check(args.min_p >= 0 && args.min_p <= 1, value, op, ": min_p must be 0 to 1, got ", args.min_p);
  check(std::isfinite(args.repetition_penalty) && args.repetition_penalty > 0, value, op,
        ": repetition_penalty must be finite and positive, got ", args.repetition_penalty);
  check(args.repetition_penalty == 1 || ids, value, op, ": ids must be given with repetition_penalty=",
        args.repetition_penalty, ", got None");
  return args;
}

Call describe(const SampleArgs& args) {
  return Call{.read = bytes_of(args.logits) + bytes_of(args.ids), .written = bytes_of(args.y)}
      .with(args.logits, args.y);
}

}  // namespace lowbit
