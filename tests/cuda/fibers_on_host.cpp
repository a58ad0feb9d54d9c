// SPDX-License-Identifier: Apache-2.0
// The fibers that stand for CUDA threads: a CTA is run to its end before the next. It looks for faults: threads run in
// an order that a seed shuffles, from one collective operation to the next, and whole warps fall behind; shared memory
// is full of nan bits before each CTA; threads that wait for what can never come are found.
#include <sanitizer/asan_interface.h>

#include <algorithm>

#include "fibers_on_host.hpp"

namespace on_host {

std::vector<Fiber> fibers;
std::minstd_rand coins;
std::vector<std::function<void()>> bulk_copies;
unsigned current = 0, dynamic_bytes = 0;
bool begins_early = false;

namespace {

jmp_buf scheduler;
void (*body)(const void*) = nullptr;
const void* arguments = nullptr;
bool failed = false;  // a thread has ended the launch

void run_body() {
  for (;;) {  // of the next CTA: starting a fiber anew is two calls of the system
    body(arguments);
    wait(State::done);
  }
}

[[gnu::noinline]] void resume(unsigned index) {
  current = index;
  if (_setjmp(scheduler) != 0) return;
  Fiber& fiber = fibers[index];
  if (fiber.begun) _longjmp(fiber.resume, 1);
  fiber.begun = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.data(), fiber.start.uc_stack.ss_size = kStack, fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, run_body, 0);
  setcontext(&fiber.start);
}

// Lets threads [from, to) go on if all of them have come to `state`.
void release(unsigned from, unsigned to, State state) {
  for (unsigned i = from; i < to; i++)
    if (fibers[i].state != state) return;
  for (unsigned i = from; i < to; i++) fibers[i].state = State::runs;
}

bool run_cta(unsigned threads, std::mt19937& random) {
  if (fibers.size() != threads) fibers = std::vector<Fiber>(threads);
  failed = false, coins.seed(random()), bulk_copies.clear();
  for (Fiber& fiber : fibers)
    fiber.state = State::runs, fiber.collectives = fiber.groups = fiber.groups_of_products = 0,
    fiber.copies.clear(), fiber.products.clear(), fiber.has_waited = !begins_early;
  std::vector<unsigned> order(threads);
  for (unsigned i = 0; i < threads; i++) order[i] = i;
  for (uint64_t asleep = 0;;) {
    std::shuffle(order.begin(), order.end(), random);
    if (random() % 8 == 0) asleep = random();  // warps, for a while: the others get ahead as far as they can
    bool any = false, done = true;
    for (const unsigned i : order) {
      if (fibers[i].state != State::runs || (asleep >> i / 32 & 1)) continue;
      any = true;
      resume(i);
      if (fibers[i].state == State::at_warp) release(i / 32 * 32, std::min(i / 32 * 32 + 32, threads), State::at_warp);
      if (fibers[i].state == State::at_barrier) release(0, threads, State::at_barrier);
    }
    for (const Fiber& fiber : fibers) done &= fiber.state == State::done;
    if (failed) return false;
    if (done) {
      for (const Fiber& fiber : fibers)
        if (!fiber.has_waited)
          return std::fputs("emulated CUDA: a thread did not wait for the kernels before\n", stderr), false;
      return true;
    }
    if (!any && !asleep) return false;
    if (!any) asleep = 0;
  }
}

// Shared memory of each declaration: full of nan bits when a CTA begins, between guards that are whole when it ends.
// With AddressSanitizer (tools/sanitize) the guards cannot be read either.
constexpr unsigned char kGuardByte = 0xa5;
std::vector<std::pair<unsigned char*, std::size_t>> all_shared;  // the first guard, and bytes of the memory
void poison(unsigned char* guarded, std::size_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(guarded, kGuard + bytes + kGuard);
  std::memset(guarded, kGuardByte, kGuard), std::memset(guarded + kGuard, 0xff, bytes);
  std::memset(guarded + kGuard + bytes, kGuardByte, kGuard);
  ASAN_POISON_MEMORY_REGION(guarded, kGuard), ASAN_POISON_MEMORY_REGION(guarded + kGuard + bytes, kGuard);
}
bool guards_are_whole() {
  const auto is_whole = [](const unsigned char* guard) {
    return std::all_of(guard, guard + kGuard, [](unsigned char byte) { return byte == kGuardByte; });
  };
  for (const auto& [guarded, bytes] : all_shared) {
    ASAN_UNPOISON_MEMORY_REGION(guarded, kGuard + bytes + kGuard);
    if (!is_whole(guarded) || !is_whole(guarded + kGuard + bytes)) {
      std::fprintf(stderr, "emulated CUDA: a CTA wrote outside of %zu bytes of shared memory\n", bytes);
      return false;
    }
  }
  return true;
}

}  // namespace

void wait(State state) {
  fibers[current].state = state;
  if (_setjmp(fibers[current].resume) == 0) _longjmp(scheduler, 1);
}

void end_launch(const char* why) {
  std::fprintf(stderr, "emulated CUDA: %s\n", why);
  lowbit::gpu::fail();
}

const std::array<uint32_t, 6>& Exchanged::of(unsigned lane) const { return fibers[warp * 32 + lane].deposit[slot]; }
Exchanged exchange(const std::array<uint32_t, 6>& words) {
  const unsigned me = current;
  const int slot = fibers[me].collectives++ & 1;
  fibers[me].deposit[slot] = words;
  wait(State::at_warp);
  return {me / 32, slot};
}
uint32_t shuffled(uint32_t word, unsigned lane) { return exchange({word}).of(lane)[0]; }

void add_shared(unsigned char* guarded, std::size_t bytes) {
  poison(guarded, bytes), all_shared.emplace_back(guarded, bytes);
}
void fail_for_dynamic_bytes(std::size_t used) {
  std::fprintf(stderr, "emulated CUDA: a launch has %u bytes of shared memory, its kernel uses %zu\n", dynamic_bytes,
               used);
  lowbit::gpu::fail();
}

}  // namespace on_host

void lowbit::gpu::fail() {
  on_host::failed = true;
  on_host::wait(on_host::State::done);
}

bool lowbit_run_grid(void (*kernel)(const void*), const void* args, unsigned ctas, unsigned threads,
                     unsigned shared_bytes, unsigned seed, bool early) {
  std::mt19937 random(seed);
  on_host::dynamic_bytes = shared_bytes, on_host::begins_early = early;
  on_host::body = kernel, on_host::arguments = args, gridDim.x = ctas;
  for (unsigned i = 0; i < ctas; i++) {
    blockIdx.x = i;
    for (const auto& [memory, bytes] : on_host::all_shared) on_host::poison(memory, bytes);
    if (!on_host::run_cta(threads, random)) return on_host::fibers.clear(), false;  // they are in the middle of a CTA
    if (!on_host::guards_are_whole()) return false;
  }
  return true;
}
