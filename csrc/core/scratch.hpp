// SPDX-License-Identifier: Apache-2.0
// Scratch memory of the calling thread: a stack, so that a function may take some while its caller holds some. 64-byte
// aligned, kept between calls, grown on demand, freed when the thread ends.
#pragma once

#include "core/arena.hpp"

namespace lowbit {

// Last taken, first given back. Use Scratch.
void* take_scratch(int64_t bytes);
void give_scratch_back() noexcept;

namespace {

// RAII: an array of scratch memory. Destroyed by the thread that made it.
class Scratch {
 public:
  LOWBIT_INLINE explicit Scratch(int64_t bytes) : data_(take_scratch(bytes)) {}
  LOWBIT_INLINE ~Scratch() { give_scratch_back(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T>
  LOWBIT_INLINE T* as() const { return static_cast<T*>(data_); }
  LOWBIT_INLINE Arena arena() const { return {static_cast<char*>(data_), 0}; }

 private:
  void* data_;
};

}  // namespace
}  // namespace lowbit
