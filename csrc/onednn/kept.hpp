// SPDX-License-Identifier: Apache-2.0
// What oneDNN made, by all that it depends on.
#pragma once

#include <list>
#include <map>
#include <memory>

namespace lowbit::onednn {

constexpr std::size_t kMostKept = 256;

// Each thread has its own, of which the last kMostKept that it asked for stay, with no lock that a child could find
// held that was forked meanwhile; what is large in a primitive, its code, oneDNN shares between equal ones.
template <class Key, class Made>
class Kept {
 public:
  std::shared_ptr<const Made> find(const Key& key) {
    if (const auto at = found_.find(key); at != found_.end()) {
      entries_.splice(entries_.begin(), entries_, at->second);
      return at->second->second;
    }
    entries_.emplace_front(key, std::make_shared<const Made>(key));
    found_[key] = entries_.begin();
    if (entries_.size() > kMostKept) {
      found_.erase(entries_.back().first);
      entries_.pop_back();
    }
    return entries_.front().second;
  }
  std::size_t size() const { return entries_.size(); }

 private:
  using Entry = std::pair<Key, std::shared_ptr<const Made>>;
  std::list<Entry> entries_;  // the one that was asked for last comes first
  std::map<Key, typename std::list<Entry>::iterator> found_;
};

}  // namespace lowbit::onednn
