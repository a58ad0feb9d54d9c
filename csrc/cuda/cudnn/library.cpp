// SPDX-License-Identifier: Apache-2.0
#include "cuda/cudnn/library.hpp"

#include <map>
#include <mutex>
#include <vector>

#include "core/once.hpp"
#include "cuda/runtime/libraries.hpp"

namespace lowbit::cuda {
namespace {

// Plans for a device described by a text, and their images: 9.8; 9.8 to 9.18 are untested.
constexpr std::size_t kOldest = 90800;

#define LOWBIT_CUDNN(X)                            \
  X(create, "cudnnCreate", CudnnHandle* handle)    \
  X(set_stream, "cudnnSetStream", CudnnHandle handle, void* stream)

struct Cudnn {
  LOWBIT_CUDNN(LOWBIT_FUNCTION_MEMBER)
  const char* (*error_text)(int status);
};

const Cudnn& cudnn() {
  static std::atomic<const Cudnn*> kept{nullptr};
  return made_once(kept, [] {
    const Library& found = library(LibraryName::cudnn);
    return Cudnn{LOWBIT_CUDNN(LOWBIT_FUNCTION_FOUND).error_text = reinterpret_cast<const char* (*)(int)>(
                     found.symbol("cudnnGetErrorString"))};
  });
}

void ensure_cudnn(int status, Device device, std::string_view what) {
  check(status == 0, ErrorKind::runtime, name_of(device), ": ", what, " failed: ", cudnn().error_text(status), " (",
        status, ")");
}

std::string why_missing() {
  if (!has_cudnn_frontend()) return make_plan({}, {}).refused;
  const Library& found = library(LibraryName::cudnn);
  if (!found.handle) return found.missing;
  try {
    const std::size_t version = cudnn_version();
    if (version < kOldest) return concat(found.path, " is of version ", version, ", wanted ", kOldest, " or later");
    if (version == 91000 || version == 91001) return concat(found.path, ": 9.10.0 and 9.10.1 have known faults");
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

// Never destroyed: a forked child, or a process at exit, has no device to destroy them on.
struct Handles {
  mutable std::mutex mutex;
  mutable std::map<int16_t, std::vector<CudnnHandle>> free;
};

const Handles& handles() {
  static std::atomic<const Handles*> kept{nullptr};
  return made_once(kept, [] { return Handles(); });
}

CudnnHandle take(Device device) {
  const std::lock_guard lock(handles().mutex);
  std::vector<CudnnHandle>& free = handles().free[device.index];
  if (free.empty()) return nullptr;
  const CudnnHandle handle = free.back();
  free.pop_back();
  return handle;
}

}  // namespace

const std::string& cudnn_missing() {
  static std::atomic<const std::string*> kept{nullptr};
  return made_once(kept, why_missing);
}

std::size_t cudnn_version() {
  return reinterpret_cast<std::size_t (*)()>(library(LibraryName::cudnn).symbol("cudnnGetVersion"))();
}

HandleFor::HandleFor(const Place& place) : device_(place.device), handle_(take(place.device)) {
  if (!handle_) ensure_cudnn(cudnn().create(&handle_), device_, "cudnnCreate");
  ensure_cudnn(cudnn().set_stream(handle_, place.stream), device_, "cudnnSetStream");
}

HandleFor::~HandleFor() {
  const std::lock_guard lock(handles().mutex);
  handles().free[device_.index].push_back(handle_);
}

}  // namespace lowbit::cuda
