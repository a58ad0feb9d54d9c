// SPDX-License-Identifier: Apache-2.0
#include "core/scratch.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace lowbit {
namespace {

constexpr int64_t kPage = 4096;  // pieces begin at pages, so that their place in a cache does not depend on the caller

// Memory of the system, of which the first `used` bytes are taken.
struct Block {
  char* data;
  int64_t bytes, used;
};

// Pieces lie behind one another in a block. One that does not fit goes to a further block; once all pieces are given
// back, one block as large as all of them takes their place.
class Stack {
 public:
  ~Stack() { free_blocks(); }

  void* take(int64_t bytes) {
    const int64_t room = round_up((bytes ? bytes : 1) + kRedZone, kPage);
    if (pieces_.empty() && (blocks_.size() != 1 || blocks_[0].bytes < room)) join_blocks(room);
    std::size_t at = pieces_.empty() ? 0 : pieces_.back().block;  // blocks after the last piece are empty
    while (at < blocks_.size() && blocks_[at].bytes - blocks_[at].used < room) at++;
    pieces_.reserve(pieces_.size() + 1);
    if (at == blocks_.size()) add_block(room);
    char* const data = blocks_[at].data + blocks_[at].used;
    pieces_.push_back({at, blocks_[at].used, bytes});
    blocks_[at].used += room;
    if (kRedZones) {  // bytes of an earlier piece have no owner: they become NaN
      LOWBIT_ALLOW(data, bytes);
      std::memset(data, 0xff, static_cast<std::size_t>(bytes));
    }
    return data;
  }

  void give_back() noexcept {
    const Piece& piece = pieces_.back();
    Block& block = blocks_[piece.block];
    block.used = piece.begin;
    LOWBIT_FORBID(block.data + piece.begin, piece.bytes);
    pieces_.pop_back();
  }

 private:
  struct Piece {
    std::size_t block;
    int64_t begin, bytes;
  };

  void add_block(int64_t bytes) {
    blocks_.reserve(blocks_.size() + 1);
    char* const data = static_cast<char*>(std::aligned_alloc(kPage, static_cast<std::size_t>(bytes)));
    if (!data) throw std::bad_alloc();
    LOWBIT_FORBID(data, bytes);
    blocks_.push_back({data, bytes, 0});
  }

  void join_blocks(int64_t room) {
    int64_t bytes = 0;
    for (const Block& block : blocks_) bytes += block.bytes;
    free_blocks();
    add_block(bytes > room ? bytes : room);
  }

  void free_blocks() {
    for (const Block& block : blocks_) {
      LOWBIT_ALLOW(block.data, block.bytes);
      std::free(block.data);
    }
    blocks_.clear();
  }

  std::vector<Block> blocks_;
  std::vector<Piece> pieces_;
};

thread_local Stack stack;

}  // namespace

void* take_scratch(int64_t bytes) { return stack.take(bytes); }

void give_scratch_back() noexcept { stack.give_back(); }

}  // namespace lowbit
