// SPDX-License-Identifier: Apache-2.0
// as_team: what test_team.py compiles, with ThreadSanitizer. Regions of every width, by a team of four on however many
// cores there are.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/parallel.cpp"  // with the one instance of CrowdedCores that its regions ask

namespace {

void want(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Every part of a region runs once, and what it wrote is there when the region is over.
void regions() {
  int parts[9];
  for (int region = 0; region < 3000; region++) {
    const int threads = region % 9 + 1;
    for (int& part : parts) part = 0;
    lowbit::parallel(threads, [&](int thread) { parts[thread]++; });
    for (int i = 0; i < 9; i++) want(parts[i] == (i < threads), "every part runs once");
    int sums[37] = {};
    lowbit::parallel_for(37, threads, [&](int64_t task) { sums[task] += static_cast<int>(task); });
    for (int i = 0; i < 37; i++) want(sums[i] == i, "every task runs once");
  }
}

// The first error of a region reaches its caller, and the team goes on.
void errors() {
  for (int bad = 0; bad < 4; bad++) {
    std::atomic<int> ran{0};
    try {
      lowbit::parallel(4, [&](int thread) {
        ran++;
        if (thread == bad) throw std::runtime_error("a part failed");
      });
      want(false, "a region whose part failed must throw");
    } catch (const std::runtime_error&) {
    }
    want(ran == 4, "the other parts run");
  }
  regions();
}

// Nobody waits for a slow core: while one task does not end, the other threads run all that is left, also of its thread's
// range. The held task is the first of each range in turn, and ends once it has seen the others done.
void slow_core() {
  constexpr int kTasks = 40, kThreads = 4, kRange = kTasks / kThreads;
  for (int held = 0; held < kTasks; held += kRange) {
    std::atomic<int> done{0};
    int seen = 0;
    lowbit::parallel_for(kTasks, kThreads, [&](int64_t task) {
      const int64_t begin = lowbit::ticks();  // a minute is for a team that waits: it fails and does not hang
      if (task == held)
        while ((seen = done) < kTasks - 1 && lowbit::ticks() - begin < lowbit::kMillisecond * 60000) std::this_thread::yield();
      done++;
    });
    want(seen == kTasks - 1, "other threads take the tasks of one that is held");
  }
}

// Cores are crowded once callers waited for a fifth of a window, and only for a while; meanwhile a team is its regions.
void crowded() {
  lowbit::CrowdedCores cores;
  for (int i = 0; i < 1000; i++) cores.waited(lowbit::kMillisecond / 2);
  want(!cores.now(), "the last task of another thread may take as long");
  cores.waited(lowbit::kMillisecond * 5000);
  want(!cores.now(), "one pause of the machine says nothing");
  for (int i = 0; i < 3; i++) cores.waited(lowbit::kMillisecond * 10);
  want(cores.now(), "three time slices do");
  const int64_t begin = lowbit::ticks();
  while (cores.now()) want(lowbit::ticks() - begin < lowbit::kMillisecond * 60000, "torch's threads are tried again");

  want(lowbit::threads_worth(lowbit::kSerialProducts) == 4, "threads for a product of medium size");
  for (int i = 0; i < 3; i++) lowbit::CrowdedCores::instance().waited(lowbit::kMillisecond * 10);
  want(lowbit::threads_worth(lowbit::kSerialProducts) == 1, "which is its caller's alone where cores are crowded");
  const int64_t before = lowbit::opened_regions();
  lowbit::as_team([] { regions(), errors(), lowbit::as_team([] { regions(); }); });
  want(lowbit::opened_regions() == before + 1, "all regions of a team count as one");
}

}  // namespace

int main() {
  want(lowbit::num_threads() == 4, "OMP_NUM_THREADS is 4");
  regions(), slow_core();
  for (int i = 0; i < 3; i++)
    lowbit::as_team([] { want(lowbit::num_threads() == 4, "threads of a team"), regions(), slow_core(), errors(); });
  lowbit::as_team([] { lowbit::as_team([] { regions(); }), regions(); });
  try {
    lowbit::as_team([] { regions(), throw std::runtime_error("the leader failed"); });
    want(false, "an error of the leader must come through");
  } catch (const std::runtime_error&) {
  }
  lowbit::as_team([] {});
  // Callers at once: one has the pool, the others are alone.
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; i++) callers.emplace_back([] { lowbit::as_team([] { regions(); }); });
  for (std::thread& caller : callers) caller.join();
  crowded();
  std::puts("a team holds");
}
