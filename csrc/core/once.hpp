// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

namespace lowbit {

// The result of `make`, created by the first call and kept. A static variable has a guard: a child forked while another
// thread initializes it would wait there forever. Here two threads may both create the value, and one is kept.
template <class T, class Make>
const T& made_once(std::atomic<const T*>& kept, Make&& make) {
  const T* first = kept.load(std::memory_order_acquire);
  if (first) return *first;
  const T* mine = new T(make());
  if (kept.compare_exchange_strong(first, mine, std::memory_order_acq_rel)) return *mine;
  delete mine;
  return *first;
}

}  // namespace lowbit
