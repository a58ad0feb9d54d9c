// SPDX-License-Identifier: Apache-2.0
#include "recorder/watcher.hpp"

#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>

#include "core/error.hpp"
#include "core/os.hpp"
#include "recorder/ring.hpp"
#include "recorder/settings.hpp"

namespace lowbit::recorder {
namespace {

std::mutex mutex;  // held while the thread is started
std::atomic<int64_t> timeout_ns{0};  // 0: no timeout
std::atomic<bool> wanted{false}, running{false}, signalled{false};
bool installed = false;
std::atomic<os::Semaphore*> wake{nullptr};  // of this process's thread, never destroyed

void on_signal() {
  signalled = true;
  wake.load()->post();
}

void dump(const Ring& ring, const std::string& reason) {
  const std::string path = next_dump_path(ring);
  const std::string failed = path.empty() ? ring.reason : write_dump(ring, path, reason);
  std::fprintf(stderr, "lowbit recorder: %s; %s%s\n", reason.c_str(), failed.empty() ? "written to " : "not written: ",
               failed.empty() ? path.c_str() : failed.c_str());
}

// Each call is reported once.
void look(uint64_t& told) {
  const Ring* const ring = ring_if_made();
  if (!ring) return;
  const Oldest oldest = oldest_started(*ring);
  const bool asked = signalled.exchange(false);
  const int64_t timeout = timeout_ns;
  const int64_t age = oldest.record ? static_cast<int64_t>(now_ns() - oldest.start_ns) : 0;
  const bool late = oldest.record && timeout > 0 && age > timeout && told != oldest.sequence + 1;
  if (late) told = oldest.sequence + 1;
  if (!asked && !late) return;
  std::string what = asked ? "asked by a signal" : "";
  if (oldest.record) {
    const auto text = [](const auto& field) { return std::string(field, strnlen(field, sizeof field)); };
    what += concat(asked ? ", " : "", text(oldest.record->op), " (", text(oldest.record->row), "), call ",
                   oldest.sequence, " in thread ", oldest.record->thread, ", runs for ",
                   static_cast<double>(age / 1000000) / 1e3, " s");
  }
  dump(*ring, what);
}

void watch_on() {
  uint64_t told = 0;
  while (running) {
    const int64_t timeout = timeout_ns, period = timeout > 0 && timeout < 4000000000 ? timeout / 4 + 1 : 1000000000;
    wake.load()->wait(period);
    if (running) look(told);
  }
}

// Starts the thread and installs the handler once; a forked child inherits the handler.
void start_thread(double seconds) {
  const std::lock_guard lock(mutex);
  timeout_ns = static_cast<int64_t>(seconds * 1e9), wanted = true;
  if (running) return;
  wake = new os::Semaphore, running = true;
  os::start_thread_without_signals(watch_on);
  if (!installed) os::on_user_signal(on_signal);
  installed = true;
}

}  // namespace

void watch(double seconds) {
  check(is_timeout(seconds), ErrorKind::value, "watch: timeout must be 0 to 1e9 seconds, got ", seconds);
  if (!ring()) start({}, "");
  start_thread(seconds);
}

bool is_watched() { return running; }

void watch_new_ring() {
  if (wanted) start_thread(static_cast<double>(timeout_ns) / 1e9);
  else if (settings().timeout) start_thread(*settings().timeout);
}

void forget_watcher() {
  new (&mutex) std::mutex;
  running = false;
}

}  // namespace lowbit::recorder
