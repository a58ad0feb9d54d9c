// SPDX-License-Identifier: Apache-2.0
#include "level_zero/runtime/columns.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace lowbit::level_zero {
namespace {

constexpr uint32_t kLastColumn = 8;  // of operands; tools/spirv has the same

// Varints: 7 bits a byte, the lowest first.
class Numbers {
 public:
  explicit Numbers(std::span<const uint8_t> bytes = {}) : rest_(bytes) {}

  uint32_t next() {
    uint32_t number = 0;
    for (int shift = 0;; shift += 7) {
      const uint8_t byte = take(1)[0];
      number |= static_cast<uint32_t>(byte & 127) << shift;
      if (byte < 128) return number;
    }
  }
  std::span<const uint8_t> take(std::size_t bytes) {
    check(bytes <= rest_.size(), ErrorKind::runtime, "level_zero: the columns of a module are cut off");
    const std::span<const uint8_t> taken = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return taken;
  }

 private:
  std::span<const uint8_t> rest_;
};

struct Column {
  Numbers numbers;
  uint32_t word = 0;  // the last one

  uint32_t next() {
    const uint32_t number = numbers.next();
    return word += number & 1 ? ~(number >> 1) : number >> 1;
  }
};

}  // namespace

std::vector<uint32_t> from_columns(std::span<const uint8_t> bytes) {
  Numbers file(bytes);
  std::vector<uint32_t> words;
  const std::size_t count = file.next();
  struct Entry { uint32_t operation, place, bytes; };
  std::vector<Entry> table(file.next());
  for (Entry& entry : table) entry = {.operation = file.next(), .place = file.next(), .bytes = file.next()};
  std::map<std::pair<uint32_t, uint32_t>, Column> columns;
  for (const Entry& entry : table) columns[{entry.operation, entry.place}].numbers = Numbers(file.take(entry.bytes));

  words.reserve(count);
  Numbers& operations = columns[{0, 0}].numbers;
  while (words.size() < std::min<std::size_t>(count, 5)) words.push_back(columns[{0, 1}].next());
  while (words.size() < count) {
    const uint32_t operation = operations.next(), length = columns[{operation, 0}].next();
    words.push_back(length << 16 | operation);
    for (uint32_t k = 1; k < length; k++) words.push_back(columns[{operation, std::min(k, kLastColumn)}].next());
  }
  return words;
}

}  // namespace lowbit::level_zero
