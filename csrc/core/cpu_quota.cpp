// SPDX-License-Identifier: Apache-2.0
#include "core/cpu_quota.hpp"

#include <algorithm>
#include <atomic>
#include <fstream>
#include <limits>
#include <string>

#include "core/once.hpp"

namespace lowbit {
namespace {

constexpr double kNoQuota = std::numeric_limits<double>::infinity();

double ratio(const std::string& quota, double period) {
  try {
    const double allowed = std::stod(quota);  // v2: "max" without a quota; v1: -1
    return allowed > 0 && period > 0 ? allowed / period : kNoQuota;
  } catch (const std::exception&) {
    return kNoQuota;
  }
}

double quota_v2(const std::string& group) {  // cpu.max: "50000 100000"
  std::ifstream file(group + "/cpu.max");
  std::string quota;
  double period = 0;
  return file >> quota >> period ? ratio(quota, period) : kNoQuota;
}

double quota_v1(const std::string& group) {
  std::ifstream of_quota(group + "/cpu.cfs_quota_us"), of_period(group + "/cpu.cfs_period_us");
  std::string quota;
  double period = 0;
  return of_quota >> quota && of_period >> period ? ratio(quota, period) : kNoQuota;
}

// The smallest quota of a group and those around it.
template <class Quota>
double smallest(const std::string& root, std::string group, Quota quota) {
  double found = quota(root);
  while (!group.empty() && group != "/") {
    found = std::min(found, quota(root + group));
    group.erase(group.rfind('/'));
  }
  return found;
}

double read_quota() {
  std::ifstream groups("/proc/self/cgroup");  // lines "number:controllers:group"; v2 has number 0 and no controllers
  double found = kNoQuota;
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = ',' + line.substr(first + 1, second - first - 1) + ',', group = line.substr(second + 1);
    if (controllers == ",,") found = std::min(found, smallest("/sys/fs/cgroup", group, quota_v2));
    else if (controllers.find(",cpu,") != std::string::npos)
      found = std::min(found, smallest("/sys/fs/cgroup/cpu", group, quota_v1));
  }
  return found;
}

}  // namespace

double cpu_quota() {
  static std::atomic<const double*> kept{nullptr};
  return made_once(kept, read_quota);
}

}  // namespace lowbit
