// SPDX-License-Identifier: Apache-2.0
#include "recorder/folder.hpp"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <vector>

#include "core/error.hpp"
#include "recorder/ring.hpp"
#include "recorder/settings.hpp"

namespace lowbit::recorder {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kKeptFiles = 64;  // files of ended processes: 37 MB
constexpr std::chrono::hours kKept{24};

bool is_chosen() { return !settings().folder.empty(); }

// In the default folder, removes files of ended processes that are older than a day, and the oldest beyond 64. A live
// process holds its file; process numbers may differ between containers.
void clean(const std::string& folder) {
  struct RingFile {
    fs::file_time_type changed;
    fs::path path;
  };
  std::vector<RingFile> kept;
  std::error_code failed, ignored;
  for (fs::directory_iterator i(folder, failed), end; !failed && i != end; i.increment(failed)) {
    const std::string name = i->path().filename().string();
    if (!name.starts_with("lowbit-") || (!name.ends_with(".ring") && !name.ends_with(".dump"))) continue;
    if (!fs::is_regular_file(i->symlink_status(ignored)) || os::is_held(i->path().string())) continue;
    const fs::file_time_type changed = i->last_write_time(ignored);
    if (changed < fs::file_time_type::clock::now() - kKept) fs::remove(i->path(), ignored);
    else kept.push_back({changed, i->path()});
  }
  if (kept.size() <= kKeptFiles) return;
  std::sort(kept.begin(), kept.end(), [](const RingFile& a, const RingFile& b) { return a.changed < b.changed; });
  for (std::size_t i = 0; i + kKeptFiles < kept.size(); i++) fs::remove(kept[i].path, ignored);
}

}  // namespace

std::string folder() { return is_chosen() ? settings().folder : os::folder_of_this_user(); }

os::MappedFile make_file(std::size_t bytes) {
  const std::string in = folder();
  if (std::string reason = os::make_folder(in, !is_chosen()); !reason.empty()) return {.reason = std::move(reason)};
  if (!is_chosen()) clean(in);
  // A file of this name was left by a dead process with our number: no two live ones of a host share it.
  return os::map_new_file(concat(in, "/lowbit-", os::host_name(), "-", os::process_number(), ".ring"), bytes);
}

}  // namespace lowbit::recorder
