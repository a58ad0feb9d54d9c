// SPDX-License-Identifier: Apache-2.0
#include "cpu/packed_sequences.hpp"

#include "core/error.hpp"

namespace lowbit::cpu {

void refuse_bad_lengths(std::string_view op, const TensorView& cu_seqlens, std::string_view name, int64_t tokens) {
  const int64_t sequences = cu_seqlens ? cu_seqlens.size(0) - 1 : -1;
  for (int64_t n = 0; n <= sequences; n++) {
    const int64_t end = end_in(cu_seqlens, n), least = n == 0 ? 0 : end_in(cu_seqlens, n - 1);
    const bool fits = n == 0 ? end == 0 : end >= least && (n < sequences || end == tokens);
    check(fits && (n > 0 || sequences > 0 || tokens == 0), ErrorKind::value, op,
          ": cu_seqlens must rise from 0 to the ", tokens, " tokens of ", name, ", got cu_seqlens[", n, "] = ", end,
          n == 0 ? "" : concat(" after ", least));
  }
}

}  // namespace lowbit::cpu
