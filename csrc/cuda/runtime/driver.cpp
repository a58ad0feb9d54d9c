// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/driver.hpp"

#include <array>

#include "core/once.hpp"

namespace lowbit::cuda {
namespace {

constexpr int kMaxDevices = 64;

Driver open_driver() {
  const Library& found = library(LibraryName::driver);
  const Driver driver{LOWBIT_CUDA_DRIVER(LOWBIT_FUNCTION_FOUND)};
  const Result failed = driver.init(0);
  const char* name = nullptr;
  if (failed) driver.error_name(failed, &name);
  check(!failed, ErrorKind::runtime, "cuInit failed: ", name ? name : "an unknown error", " (", failed, ")");
  int version = 0;
  driver.version(&version);
  check(version >= kOldestDriver, ErrorKind::runtime, "the driver is of CUDA ", version_text(version),
        ", wanted ", version_text(kOldestDriver), " or later");
  return driver;
}

// A property of each device, queried once.
template <class T>
using PerDevice = std::array<std::atomic<const T*>, kMaxDevices>;

template <class T>
std::atomic<const T*>& of(PerDevice<T>& kept, Device device) {
  return kept[static_cast<std::size_t>(device.index < kMaxDevices ? device.index : kMaxDevices - 1)];
}

int attribute(int which, Device device) {
  DeviceOrdinal ordinal = 0;
  int value = 0;
  ensure(driver().device_get(&ordinal, device.index), device, "cuDeviceGet");
  ensure(driver().device_attribute(&value, which, ordinal), device, "cuDeviceGetAttribute");
  return value;
}

std::string reason_of(Device device) {
  try {
    int count = 0;
    ensure(driver().device_count(&count), "cuDeviceGetCount");
    if (device.index >= count) return concat("there is no ", name_of(device), ", the driver has ", count, " devices");
    const int number = capability(device);
    if (number < 80) return concat("compute capability ", number / 10, ".", number % 10, ", wanted 8.0 or later");
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

const Driver& driver() {
  static std::atomic<const Driver*> kept{nullptr};
  return made_once(kept, open_driver);
}

void ensure(Result result, Device device, std::string_view what) {
  if (result != 0) [[unlikely]] ensure(result, concat(name_of(device), ": ", what));
}

void ensure(Result result, std::string_view what) {
  if (result == 0) [[likely]] return;
  const char *name = nullptr, *text = nullptr;
  driver().error_name(result, &name), driver().error_text(result, &text);
  throw Error(ErrorKind::runtime, concat(what, " failed: ", name ? name : "unknown error", " (", result,
                                         text ? "): " : ")", text ? text : ""));
}

const std::string& unavailable(Device device) {
  static PerDevice<std::string> kept{};
  return made_once(of(kept, device), [&] { return reason_of(device); });
}

int capability(Device device) {
  static PerDevice<int> kept{};
  return made_once(of(kept, device),
                   [&] { return 10 * attribute(kComputeMajor, device) + attribute(kComputeMinor, device); });
}

std::string architecture(Device device) {
  const int number = capability(device);
  return concat("sm_", number, number >= 90 ? "a" : "");  // a: with the instructions specific to this generation
}

int multiprocessors(Device device) {
  static PerDevice<int> kept{};
  return made_once(of(kept, device), [&] { return attribute(kMultiprocessors, device); });
}

bool can_begin_early(Device device) {
  static PerDevice<bool> kept{};
  return made_once(of(kept, device), [&] {
    int version = 0;
    driver().version(&version);
    return version >= 12030 && capability(device) >= 90;
  });
}

InContext::InContext(Device device) {
  static std::array<std::atomic<Context>, kMaxDevices> primary{};
  std::atomic<Context>& kept = primary[static_cast<std::size_t>(device.index)];
  if (!kept) {  // retained until the process ends, as torch does
    DeviceOrdinal ordinal = 0;
    Context made = nullptr;
    ensure(driver().device_get(&ordinal, device.index), device, "cuDeviceGet");
    ensure(driver().primary_context(&made, ordinal), device, "cuDevicePrimaryCtxRetain");
    kept = made;
  }
  Context current = nullptr;
  ensure(driver().current_context(&current), device, "cuCtxGetCurrent");
  if (current == kept) return;
  ensure(driver().push_context(kept), device, "cuCtxPushCurrent");
  pushed_ = true;
}

InContext::~InContext() {
  Context popped = nullptr;
  if (pushed_) driver().pop_context(&popped);
}

bool is_captured(const Place& place) {
  const InContext here(place.device);  // an autograd thread has no context before its first launch
  int status = 0;
  ensure(driver().is_capturing(place.stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

}  // namespace lowbit::cuda
