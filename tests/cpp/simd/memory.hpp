// SPDX-License-Identifier: Apache-2.0
// The part that checks of functions share that read and write memory. It lies between pages without access, at the
// begin of its page, one element behind it, and at the end: a function that touches more than its elements ends the
// program, and one that writes more changes bytes that are compared.
#pragma once

#ifdef _WIN32
#define NOMINMAX
#include <windows.h>
#else
#include <sys/mman.h>
#endif

#include "harness.hpp"

namespace {

// The second of three pages, which alone can be accessed; null if there is no memory.
inline char* guarded_page(std::size_t bytes) {
#ifdef _WIN32
  void* const all = VirtualAlloc(nullptr, 3 * bytes, MEM_RESERVE, PAGE_NOACCESS);
  return static_cast<char*>(VirtualAlloc(static_cast<char*>(all) + bytes, bytes, MEM_COMMIT, PAGE_READWRITE));
#else
  void* const all = mmap(nullptr, 3 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char* const page = static_cast<char*>(all) + bytes;
  return all == MAP_FAILED || mprotect(page, bytes, PROT_READ | PROT_WRITE) != 0 ? nullptr : page;
#endif
}
inline void free_guarded_page(char* page, std::size_t bytes) {
#ifdef _WIN32
  VirtualFree(page - bytes, 0, MEM_RELEASE);
#else
  munmap(page - bytes, 3 * bytes);
#endif
}

class Guarded {
 public:
  static constexpr std::size_t kBytes = 4096;
  Guarded() : page_(guarded_page(kBytes)) {
    if (!page_) std::abort();
    std::memset(page_, kUntouched, kBytes);
  }
  ~Guarded() { free_guarded_page(page_, kBytes); }
  Guarded(const Guarded&) = delete;

  // use(pointer to `count` elements) at each place.
  template <class E, class Use>
  void at_each_place(std::size_t count, Use&& use) {
    for (const std::size_t at : {std::size_t{0}, sizeof(E), kBytes - count * sizeof(E)})
      use(reinterpret_cast<E*>(page_ + at));
  }
  // True if all bytes but these are as they were made; then they are so again.
  bool only_changed(const void* begin, std::size_t bytes) {
    std::memset(const_cast<void*>(begin), kUntouched, bytes);
    bool untouched = true;
    for (std::size_t i = 0; i < kBytes; i++) untouched = untouched && page_[i] == kUntouched;
    return untouched;
  }

 private:
  static constexpr char kUntouched = 0x5a;
  char* const page_;
};

// f(p ..) is what `reference` says of the arrays of `count` elements at the pointers.
template <std::size_t count, class R, class... E>
void loads(Function<R(const E*...)> f, Call<Lanes<R>(const std::array<E, count>&...)> reference) {
  report.checks(f.text);
  using First = std::tuple_element_t<0, std::tuple<E...>>;
  Guarded memory[sizeof...(E)];
  std::array<std::array<First, count>, sizeof...(E)> given;
  Arguments<E...> arguments;
  for (uint64_t i = 0; i < arguments.count(); i += count) {
    for (std::size_t element = 0; element < count; element++)
      std::apply([&](auto... e) { std::size_t n = 0; ((given[n++][element] = e), ...); }, arguments.at(i + element));
    const auto wanted = std::apply(reference, given);
    memory[0].template at_each_place<First>(count, [&](First* first) {
      std::memcpy(first, given[0].data(), sizeof given[0]);
      if constexpr (sizeof...(E) == 1) expect(f.text, wanted, lanes_of(f.call(first)), given[0]);
      else memory[1].template at_each_place<First>(count, [&](First* second) {
        std::memcpy(second, given[1].data(), sizeof given[1]);
        expect(f.text, wanted, lanes_of(f.call(first, second)), given[0], given[1]);
      });
    });
  }
}

// f(p, a ..) writes the `count` elements that `reference` says of the lanes of a .., and nothing else.
template <std::size_t count, class E, class... A>
void stores(Function<void(E*, A...)> f, Call<std::array<E, count>(const Lanes<A>&...)> reference,
            Call<void(Lanes<A>&...)> domain = {}) {
  report.checks(f.text);
  Guarded memory;
  for_arguments<A...>([&](auto&... lanes) {
    if (domain) domain(lanes...);
    const auto wanted = reference(lanes...);
    memory.at_each_place<E>(count, [&](E* to) {
      f.call(to, vector_of<A>(lanes)...);
      auto got = wanted;
      std::memcpy(got.data(), to, sizeof got);
      expect(f.text, wanted, got, lanes...);
      if (!memory.only_changed(to, sizeof got) && report.fails(f.text))
        std::printf("it writes more than its elements\n");
    });
  });
}

// As arrays: each[i] = value(i).
template <class T, std::size_t count, class Value>
std::array<T, count> made(Value&& value) {
  std::array<T, count> r;
  for (std::size_t i = 0; i < count; i++) r[i] = static_cast<T>(value(i));
  return r;
}

}  // namespace
