// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/cubin_cache.hpp"

#include "core/disk_cache.hpp"
#include "core/os.hpp"
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
  const std::string library = os::file_of(reinterpret_cast<const void*>(&read_packed));
  if (library.empty()) return std::nullopt;
  return read_cached((fs::path(library).parent_path() / "cubins" / fs::path(path).filename()).string());
}

}  // namespace lowbit::cuda
