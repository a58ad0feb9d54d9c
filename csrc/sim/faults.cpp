// SPDX-License-Identifier: Apache-2.0
#include "sim/faults.hpp"

#include <array>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "sim/memory.hpp"

namespace lowbit::sim {
namespace {

struct State {
  std::mutex mutex;
  std::array<Injection, 4> pending{{{.times = 0}, {.times = 0}, {.times = 0}, {.times = 0}}};
  bool lost = false;
  std::map<int64_t, int64_t> launches;  // number per stream

  bool strikes(Fault fault) {  // counts down
    Injection& injection = pending[static_cast<std::size_t>(fault)];
    if (injection.times == 0) return false;
    if (injection.after > 0) return injection.after--, false;
    injection.times--;
    return true;
  }
  void check_present(int device) const {
    check(!lost, ErrorKind::runtime, "lowbit_sim:", device,
          ": the device is lost (injected; simulated.recover brings it back)");
  }
};

std::array<State, kMaxDevices> states;

State& state_of(int device) {
  check(device >= 0 && device < device_count(), ErrorKind::value, "lowbit_sim: there is no device ", device,
        ", there are ", device_count());
  return states[static_cast<std::size_t>(device)];
}

}  // namespace

void inject(int device, Fault fault, const Injection& injection) {
  check(injection.after >= 0 && injection.times >= 1 && injection.microseconds >= 0, ErrorKind::value,
        "inject: after and microseconds must be at least 0 and times at least 1, got ", injection.after, ", ",
        injection.microseconds, " and ", injection.times);
  State& state = state_of(device);
  const std::lock_guard lock(state.mutex);
  state.pending[static_cast<std::size_t>(fault)] = injection;
}

void recover(int device) {
  State& state = state_of(device);
  const std::lock_guard lock(state.mutex);
  for (Injection& injection : state.pending) injection.times = 0;
  state.lost = false;
}

int64_t launches(int device) {
  State& state = state_of(device);
  const std::lock_guard lock(state.mutex);
  int64_t all = 0;
  for (const auto& [stream, count] : state.launches) all += count;
  return all;
}

int64_t launches(int device, int64_t stream) {
  State& state = state_of(device);
  const std::lock_guard lock(state.mutex);
  const auto found = state.launches.find(stream);
  return found == state.launches.end() ? 0 : found->second;
}

bool allocation_fails(int device) {
  State& state = state_of(device);
  const std::lock_guard lock(state.mutex);
  state.check_present(device);
  return state.strikes(Fault::memory);
}

void launch(int device, int64_t stream) {
  State& state = state_of(device);
  int64_t microseconds = 0;
  {
    const std::lock_guard lock(state.mutex);
    state.check_present(device);
    state.lost = state.strikes(Fault::lost);
    state.check_present(device);
    check(!state.strikes(Fault::launch), ErrorKind::runtime, "lowbit_sim:", device, ": the launch failed (injected)");
    if (state.strikes(Fault::slow)) microseconds = state.pending[static_cast<std::size_t>(Fault::slow)].microseconds;
    state.launches[stream]++;
  }
  if (microseconds) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

}  // namespace lowbit::sim
