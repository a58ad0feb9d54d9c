// SPDX-License-Identifier: Apache-2.0
#include "core/scratch.hpp"

#include <cstring>
#include <new>
#include <vector>

namespace lowbit {
namespace {

constexpr int64_t kPage = 4096;  // arrays begin at page boundaries, so that cache conflicts do not depend on the caller

// System memory, of which the first `used` bytes are taken.
struct Block {
  char* data;
  int64_t bytes, used;
};

// Arrays follow one another in a block. One that does not fit opens a further block; once all are given back, the
// blocks are replaced by a single one as large as all of them.
class Stack {
 public:
  ~Stack() { free_blocks(); }

  void* take(int64_t bytes) {
    const int64_t needed = round_up((bytes ? bytes : 1) + kRedZone, kPage);
    if (arrays_.empty() && (blocks_.size() != 1 || blocks_[0].bytes < needed)) join_blocks(needed);
    std::size_t at = arrays_.empty() ? 0 : arrays_.back().block;  // blocks after the last array are empty
    while (at < blocks_.size() && blocks_[at].bytes - blocks_[at].used < needed) at++;
    arrays_.reserve(arrays_.size() + 1);
    if (at == blocks_.size()) add_block(needed);
    char* const data = blocks_[at].data + blocks_[at].used;
    arrays_.push_back({at, blocks_[at].used, bytes});
    blocks_[at].used += needed;
    if (kRedZones) {  // bytes of an earlier array become NaN
      LOWBIT_ALLOW(data, bytes);
      std::memset(data, 0xff, static_cast<std::size_t>(bytes));
    }
    return data;
  }

  void give_back() noexcept {
    const Array& array = arrays_.back();
    Block& block = blocks_[array.block];
    block.used = array.begin;
    LOWBIT_FORBID(block.data + array.begin, array.bytes);
    arrays_.pop_back();
  }

 private:
  struct Array {
    std::size_t block;
    int64_t begin, bytes;
  };

  void add_block(int64_t bytes) {
    blocks_.reserve(blocks_.size() + 1);
    // aligned_alloc is not everywhere
    void* const memory = ::operator new(static_cast<std::size_t>(bytes), std::align_val_t{kPage}, std::nothrow);
    if (!memory) throw std::bad_alloc();
    char* const data = static_cast<char*>(memory);
    LOWBIT_FORBID(data, bytes);
    blocks_.push_back({data, bytes, 0});
  }

  void join_blocks(int64_t needed) {
    int64_t bytes = 0;
    for (const Block& block : blocks_) bytes += block.bytes;
    free_blocks();
    add_block(bytes > needed ? bytes : needed);
  }

  void free_blocks() {
    for (const Block& block : blocks_) {
      LOWBIT_ALLOW(block.data, block.bytes);
      ::operator delete(block.data, std::align_val_t{kPage});
    }
    blocks_.clear();
  }

  std::vector<Block> blocks_;
  std::vector<Array> arrays_;
};

thread_local Stack stack;

}  // namespace

void* take_scratch(int64_t bytes) { return stack.take(bytes); }

void give_scratch_back() noexcept { stack.give_back(); }

}  // namespace lowbit
