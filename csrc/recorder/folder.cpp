// SPDX-License-Identifier: Apache-2.0
#include "recorder/folder.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "core/error.hpp"
#include "recorder/ring.hpp"
#include "recorder/settings.hpp"

namespace lowbit::recorder {
namespace {

constexpr std::size_t kKeptFiles = 64;     // files of ended processes: 37 MB
constexpr time_t kKeptSeconds = 24 * 3600;

bool is_chosen() { return !settings().folder.empty(); }

std::string said(std::string_view what, const std::string& path) {
  return concat(what, " ", path, ": ", std::strerror(errno));
}

// Why no files may be created there, or "". Another user's folder in /tmp could be read or replaced.
std::string unusable(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return said("cannot make", path);
  struct stat found;
  if (lstat(path.c_str(), &found) != 0) return said("cannot look at", path);
  if (is_chosen()) return "";
  if (!S_ISDIR(found.st_mode)) return concat(path, " is not a folder");
  if (found.st_uid != geteuid() || (found.st_mode & 077) != 0)
    return concat(path, " must belong to this user alone (mode 0700)");
  return "";
}

// A live process holds a lock on its file; process numbers may differ between containers.
bool is_of_the_dead(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) return false;
  const bool dead = flock(descriptor, LOCK_EX | LOCK_NB) == 0;
  close(descriptor);
  return dead;
}

// In the default folder, removes files of ended processes that are older than a day, and the oldest beyond 64.
void clean(const std::string& folder) {
  struct RingFile {
    time_t changed;
    std::string path;
  };
  std::vector<RingFile> kept;
  DIR* const listing = opendir(folder.c_str());
  if (!listing) return;
  while (const dirent* entry = readdir(listing)) {
    const std::string_view name = entry->d_name;
    if (!name.starts_with("lowbit-") || (!name.ends_with(".ring") && !name.ends_with(".dump"))) continue;
    const std::string path = concat(folder, "/", name);
    struct stat found;
    if (lstat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode) || !is_of_the_dead(path)) continue;
    if (found.st_mtime < std::time(nullptr) - kKeptSeconds) unlink(path.c_str());
    else kept.push_back({found.st_mtime, path});
  }
  closedir(listing);
  if (kept.size() <= kKeptFiles) return;
  std::sort(kept.begin(), kept.end(), [](const RingFile& a, const RingFile& b) { return a.changed < b.changed; });
  for (std::size_t i = 0; i + kKeptFiles < kept.size(); i++) unlink(kept[i].path.c_str());
}

}  // namespace

std::string folder() {
  if (is_chosen()) return settings().folder;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime && *runtime) return concat(runtime, "/lowbit");
  return concat(access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", "/lowbit-", geteuid());  // memory rather than disk
}

Opened make_file(std::size_t bytes) {
  Opened made;
  const std::string in = folder();
  made.reason = unusable(in);
  if (!made.reason.empty()) return made;
  if (!is_chosen()) clean(in);
  char host[64] = {};
  gethostname(host, sizeof host - 1);
  made.path = concat(in, "/lowbit-", host, "-", getpid(), ".ring");
  unlink(made.path.c_str());  // left by a dead process with our number: no two live ones of a host share it
  made.descriptor = open(made.path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (made.descriptor < 0) {
    made.reason = said("cannot make", made.path);
    return made;
  }
  flock(made.descriptor, LOCK_EX | LOCK_NB);  // fails without locks: dead processes are not recognized
  if (const int failed = posix_fallocate(made.descriptor, 0, static_cast<off_t>(bytes)); failed != 0) {
    errno = failed;
    made.reason = said(concat("no room for ", bytes, " bytes in"), made.path);
    unlink(made.path.c_str());
    close(made.descriptor);
    made.descriptor = -1;
  }
  return made;
}

}  // namespace lowbit::recorder
