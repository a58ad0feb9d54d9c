// SPDX-License-Identifier: Apache-2.0
#include "recorder/dispatch.hpp"

#include "recorder/profile.hpp"
#include "recorder/ring.hpp"

namespace lowbit::recorder {

Dispatch::Dispatch(std::string_view op, std::string_view row, const Place& place, const Call& call)
    : thread_(this_thread()) {
  const Entry entry{.op = op, .row = row, .place = place, .call = call, .thread = thread_};
  if ((wants.load(std::memory_order_relaxed) & kRing) && (ring_ = ring())) {
    const Claim claim = open_record(*ring_, entry);
    record_ = claim.record, sequence_ = claim.sequence;
  }
  if (wants.load(std::memory_order_relaxed) & kProfile) profiled_ = open_profiled(entry, profile_);
  thread_.depth++;
}

void Dispatch::close(bool finished) {
  open_ = false;
  thread_.depth--;
  const State state = finished ? State::finished : State::failed;
  if (record_) close_record(*ring_, {record_, sequence_}, state, thread_);
  if (profiled_) close_profiled(profiled_, profile_, state);
}

}  // namespace lowbit::recorder
