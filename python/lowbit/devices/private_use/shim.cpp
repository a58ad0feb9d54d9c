// SPDX-License-Identifier: Apache-2.0
// The allocator and the device guard of PrivateUse1, which torch takes from C++ only. shim.py builds it on the user's
// machine against the headers of the torch that is loaded there (c10 only, and linked to libc10 only). Both are bound
// to that one version of torch. Memory is liblowbit's (csrc/core/private_use.hpp). A stream is a name and an event is a
// time: the work of a device is done when the call that asked for it returns, so that everything that a stream could
// wait for has happened already.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kType = c10::DeviceType::PrivateUse1;

struct Usage {  // MemoryUsage of csrc/core/private_use.hpp
  int64_t live_bytes, peak_bytes, live_blocks, blocks, capacity;
};

struct Functions {  // of PrivateUse there
  void* (*allocate)(int device, size_t bytes);
  void (*deallocate)(void* pointer);
  void (*copy)(void* to, const void* from, size_t bytes);
  Usage (*usage)(int device);
  void (*reset_peak)(int device);
} lowbit;

const char* name = "";
int devices = 0;
thread_local DeviceIndex current = 0;
thread_local std::vector<c10::StreamId> current_streams;  // of each device; absent: the default stream, 0

using Clock = std::chrono::steady_clock;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(devices); }
  Device getDevice() const override { return {kType, current}; }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(!device.has_index() || device.index() < devices, name, ": there is no device ", int{device.index()},
                ", there are ", devices);
    uncheckedSetDevice(device);
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }

  static Device indexed(Device device) { return device.has_index() ? device : Device(kType, current); }
  static c10::StreamId& stream_of(Device device) {
    if (current_streams.empty()) current_streams.resize(static_cast<size_t>(devices));
    return current_streams[static_cast<size_t>(indexed(device).index())];
  }
  static Stream stream(Device device, c10::StreamId id) { return Stream(Stream::UNSAFE, indexed(device), id); }
  Stream getStream(Device device) const override { return stream(device, stream_of(device)); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream(device, ++last);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream wanted) const override {
    const Stream before = getStream(wanted.device());
    stream_of(wanted.device()) = wanted.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}

  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Clock::time_point*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    TORCH_CHECK(from && to, name, ": elapsed_time needs two recorded events");
    return std::chrono::duration<double, std::milli>(*static_cast<Clock::time_point*>(to) -
                                                     *static_cast<Clock::time_point*>(from))
        .count();
  }
};

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = lowbit.allocate(current, bytes);
    if (!data && bytes > 0) {
      const Usage now = lowbit.usage(current);
      TORCH_CHECK_WITH(OutOfMemoryError, false, name, ":", int{current}, ": out of memory: tried to allocate ",
                       bytes, " bytes; ", now.live_bytes, " of ", now.capacity, " bytes are in use");
    }
    return {data, data, lowbit.deallocate, Device(kType, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return lowbit.deallocate; }
  void copy_data(void* to, const void* from, size_t bytes) const override { lowbit.copy(to, from, bytes); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const Usage now = lowbit.usage(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
      (*bytes)[0].current = now.live_bytes, (*bytes)[0].peak = now.peak_bytes;
    for (auto* blocks : {&stats.allocation, &stats.active})
      (*blocks)[0].current = now.live_blocks, (*blocks)[0].allocated = now.blocks;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { lowbit.reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    const Usage now = lowbit.usage(device);
    return {static_cast<size_t>(now.capacity - now.live_bytes), static_cast<size_t>(now.capacity)};
  }
};

}  // namespace

// Called once. Both objects live as long as the process: torch keeps the pointers.
extern "C" void lowbit_register_device(const Functions* functions, int count, const char* called) {
  lowbit = *functions, devices = count, name = strdup(called);
  c10::SetAllocator(kType, new Allocator, 1);
  static c10::impl::DeviceGuardImplRegistrar registrar(kType, new Guard);
}
