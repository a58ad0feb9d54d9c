// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/cubin_cache.hpp"

#include <dlfcn.h>

#include "core/disk_cache.hpp"
#include "cuda/runtime/nvrtc.hpp"

namespace lowbit::cuda {

namespace fs = std::filesystem;

std::string cached_path(const std::string& source, const std::string& architecture) {
  Hash hash;
  for (const DeviceHeader& header : device_headers()) hash.add(header.name).add(header.text);
  hash.add(source).add(architecture).add(compile_options());
  return (cache_folder("cuda") / concat(architecture, "-", hash.text(), ".cubin")).string();
}

std::string cached_plan_path(const std::string& plan, const std::string& device) {
  return (cache_folder("cuda") / concat(device, "-", Hash().add(plan).text(), ".plan")).string();
}

std::optional<std::string> read_packed(const std::string& path) {
  Dl_info found{};
  if (!dladdr(reinterpret_cast<const void*>(&read_packed), &found) || !found.dli_fname) return std::nullopt;
  return read_cached((fs::path(found.dli_fname).parent_path() / "cubins" / fs::path(path).filename()).string());
}

}  // namespace lowbit::cuda
