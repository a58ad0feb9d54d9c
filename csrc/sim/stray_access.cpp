// SPDX-License-Identifier: Apache-2.0
#include "sim/stray_access.hpp"

#include <signal.h>
#include <unistd.h>

#include <cstdint>

namespace lowbit::sim {
namespace {

uintptr_t first = 0;
std::size_t length = 0, device_length = 1;
struct sigaction previous = {};

// Async-signal-safe: write(2), no allocation, no stdio.
void say(const char* text, std::size_t size) {
  if (write(STDERR_FILENO, text, size) < 0) return;
}

void on_fault(int signal, siginfo_t* info, void*) {
  const auto offset = reinterpret_cast<uintptr_t>(info->si_addr) - first;
  if (offset < length) {
    const char digit = static_cast<char>('0' + offset / device_length);
    say("\nlowbit_sim:", 12);
    say(&digit, 1);
    constexpr char kText[] =
        ": host code touched device memory outside a run (a data_ptr() read on the CPU, or a kernel given the wrong "
        "tensor)\n";
    say(kText, sizeof kText - 1);
  }
  // The access is retried after this returns, and reaches the previous handler.
  sigaction(signal, &previous, nullptr);
}

}  // namespace

void watch_for_stray_access(const void* base, std::size_t bytes, std::size_t per_device) {
  first = reinterpret_cast<uintptr_t>(base), length = bytes, device_length = per_device;
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous);
}

}  // namespace lowbit::sim
