// SPDX-License-Identifier: Apache-2.0
#include "cuda/cudnn/hidden_rows.hpp"

#include "cuda/cudnn/call.hpp"
#include "cuda/sources.hpp"

namespace lowbit::cuda {

Source hidden_rows_source() {
  return {"rows that a mask hides", concat("#include \"cuda/cudnn/hidden_rows.cuh\"\n",
                                           kernel_text("clear_hidden_rows", "kHiddenRowsThreads", "HiddenRowsCall",
                                                       "clear_hidden_rows"))};
}

void clear_hidden_rows(const CudnnCall& of, const Place& place) {
  const AttentionShape& shape = of.shape;
  const auto& [batch, head, row] = shape.stride[AttentionShape::out];
  HiddenRowsCall call{.out = {of.tensors[AttentionShape::out], batch, head, row},
                      .bias = of.tensors[AttentionShape::bias],
                      .lse = static_cast<float*>(of.tensors[AttentionShape::lse]), .bias_stride = {},
                      .rows = shape.batch * shape.heads * shape.q_length, .heads = shape.heads,
                      .length = shape.q_length, .columns = shape.ev, .keys = shape.kv_length,
                      .after = shape.kv_length, .window = shape.window,
                      .dtype = shape.dtype, .bias_dtype = shape.bias_dtype};
  if (shape.causal) call.after = shape.ends_together ? shape.kv_length - shape.q_length : 0;
  for (int d = 0; d < 4; d++) call.bias_stride[d] = shape.bias_size[d] == 1 ? 0 : shape.bias_stride[d];
  program(place, {static_cast<int64_t>(SourceKind::hidden_rows)}, hidden_rows_source)
      .launch(place, "clear_hidden_rows", ceil_div(call.rows, kHiddenRowsThreads / 32), kHiddenRowsThreads, &call);
}

}  // namespace lowbit::cuda
