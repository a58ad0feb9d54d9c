// SPDX-License-Identifier: Apache-2.0
// Row of the op attention_forward. Block lists and indices of mods are checked on the device; where there are some, the
// host waits and asks.
#include "cuda/attention/make_call.hpp"
#include "level_zero/attention/mods.hpp"
#include "level_zero/backend.hpp"

namespace lowbit::level_zero {
namespace {

void run_forward(const AttentionForwardArgs& args) {
  const ForwardShape shape = forward_shape(larger(args.q.size(3), args.ev()));
  const bool has_mods = args.score_mod || args.mask_mod, has_lists = static_cast<bool>(args.lists.kv_num_blocks);
  const Workspace workspace("attention_forward", args.place, CallMods::kBytes + larger(cuda::class_count(args), 1));
  AttentionCall call{cuda::attention_call<ModTable>(args, shape.q_tile(), kKvTile,
                                                    static_cast<uint8_t*>(workspace.at(CallMods::kBytes))),
                     static_cast<int32_t>(args.q.size(3)), static_cast<int32_t>(args.ev()), args.q.dtype,
                     args.mask.dtype};
  const CallMods mods(args.place, args.score_mod, args.mask_mod, workspace.at(0), has_mods || has_lists);
  call.score = mods.score(), call.mask = mods.mask(), call.fault = mods.fault();
  if (has_lists)
    program(args.place, "attention_prepare")
        .launch(args.place, "make_classes", args.lists.kv_num_blocks.numel(), kAttentionThreads, &call, sizeof call);
  mods.program("attention_forward", "attention_forward_mods")
      .launch(args.place, shape.kernel({"forward_64", "forward_128", "forward_256"}),
              args.batch() * args.heads() * call.q_tiles.count, kAttentionThreads, &call, sizeof call);
  mods.check_fault();
}

std::string_view refuses(const AttentionForwardArgs& args) {
  if (!is_activation(args.q.dtype)) return "inputs are neither float32 nor bfloat16 nor float16";
  if (larger(args.q.size(3), args.ev()) > kMostColumns) return "head dims above 256";
  if (args.mask && args.mask.dtype == DType::float64) return "a mask of float64";
  for (const ScoreCall* mod : {args.score_mod, args.mask_mod})
    if (const std::string_view reason = refuses_mod(mod); !reason.empty()) return reason;
  if (args.batch() * args.heads() * args.q_length() >= INT32_MAX || cuda::class_count(args) >= INT32_MAX)
    return "more than 2^31 rows or blocks";
  return "";
}

constexpr Kernel<AttentionForwardArgs> kForward[] = {{"attention_forward_level_zero", refuses, run_forward}};

}  // namespace

void add_attention_rows(Backend& backend) { add_rows(backend, kForward, std::size(kForward)); }

}  // namespace lowbit::level_zero
