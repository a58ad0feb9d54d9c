// SPDX-License-Identifier: Apache-2.0
#include "core/parallel.hpp"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/cpu_quota.hpp"
#include "core/fork.hpp"
#include "core/once.hpp"
#include "core/os.hpp"
#include "core/team.hpp"
#include "core/thread_count.hpp"

// ThreadSanitizer does not see how torch's threads are woken and joined, so the functions that they run are compiled
// without it.
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define LOWBIT_HAPPENS_BEFORE(at) __tsan_release(at)
#define LOWBIT_HAPPENS_AFTER(at) __tsan_acquire(at)
#else
#define LOWBIT_HAPPENS_BEFORE(at) static_cast<void>(at)
#define LOWBIT_HAPPENS_AFTER(at) static_cast<void>(at)
#endif

namespace lowbit {
namespace {

// C functions of libtorch_cpu's stable ABI, torch >= 2.10. torch loads its libraries with local symbols, so they are
// looked up in that library by name.
struct TorchThreads {
  int32_t (*parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*) = nullptr;
  int32_t (*get_num_threads)(uint32_t*) = nullptr;
  // OpenMP's, of the calling thread; null where torch has other threads.
  int (*openmp_threads)() = nullptr;
  void (*set_openmp_threads)(int) = nullptr;
  bool found() const { return parallel_for && get_num_threads; }
};

TorchThreads look_up(bool& loaded) {
  void* library = os::loaded_library(os::name_of_library("torch_cpu").c_str());
  loaded = library != nullptr;
  TorchThreads torch;
  torch.parallel_for = reinterpret_cast<decltype(torch.parallel_for)>(os::find_symbol(library, "torch_parallel_for"));
  torch.get_num_threads = reinterpret_cast<decltype(torch.get_num_threads)>(os::find_symbol(library, "torch_get_num_threads"));
  if (library) {
    torch.openmp_threads = reinterpret_cast<int (*)()>(os::find_symbol(library, "omp_get_max_threads"));
    torch.set_openmp_threads = reinterpret_cast<void (*)(int)>(os::find_symbol(library, "omp_set_num_threads"));
  }
  return torch;
}

// A forked child has no OpenMP workers, and libgomp would wait forever for those that torch had started, so its regions
// run on our own pool. Registered when this library is loaded, because torch's threads may run before ours do.
std::atomic<bool> forked{false};
class Pool;
std::atomic<const Pool*> pool{nullptr};  // never destroyed: workers may outlive static destructors
std::atomic<int> threads_set{0};         // set by set_num_threads; a forked child's pool uses it too
thread_local int64_t opened = 0;         // number of regions that this thread has opened
thread_local bool teamless = false;      // this thread's regions would be a team's if cores were free
struct Teamless {
  Teamless() { teamless = true; }
  ~Teamless() { teamless = false; }
};
[[gnu::constructor]] void watch_fork() {
  os::in_forked_child([] { forked = true, pool = nullptr; });  // the child has no workers and starts over
}

// Null while torch is not loaded. lowbit may be used before torch is imported, so the look-up is repeated whenever a
// library has been loaded.
const TorchThreads* loaded_torch() {
  static std::atomic<const TorchThreads*> found{nullptr};
  static std::atomic<uint64_t> missing_at{0};
  if (const TorchThreads* torch = found.load(std::memory_order_acquire)) return torch;
  // Read before the look-up: a library loaded meanwhile changes the count.
  const uint64_t count = os::libraries_loaded();
  if (missing_at.load(std::memory_order_relaxed) == count) return nullptr;
  bool loaded;
  const TorchThreads torch = look_up(loaded);
  if (!torch.found() && !loaded) {
    missing_at.store(count, std::memory_order_relaxed);
    return nullptr;
  }
  return &made_once(found, [&] { return torch; });
}

const TorchThreads* torch_threads() {
  const TorchThreads* torch = loaded_torch();
  return torch && torch->found() ? torch : nullptr;
}

// Workers that sleep between regions. One region runs at a time; that of a second caller, or a nested one, runs
// on its caller alone.
class Pool {
 public:
  static Pool& instance() {
    return const_cast<Pool&>(made_once(pool, [] { return Pool(); }));
  }

  int size() const {
    const int set = threads_set.load(std::memory_order_relaxed);
    return set ? set : size_;
  }

  void run(int threads, Region& region) {
    std::unique_lock<std::mutex> caller(one_region_, std::try_to_lock);
    if (!caller.owns_lock()) {
      for (int thread = 0; thread < threads; thread++) region.run(thread);
      return;
    }
    start_workers();
    {
      std::lock_guard lock(mutex_);
      region_ = &region;
      threads_ = threads;
      next_ = 1;
      unfinished_ = threads - 1;
    }
    wake_.notify_all();
    region.run(0);
    std::unique_lock lock(mutex_);
    while (next_ < threads_) {  // fewer workers than threads: the caller helps
      const int thread = next_++;
      lock.unlock();
      region.run(thread);
      lock.lock();
      unfinished_--;
    }
    done_.wait(lock, [&] { return unfinished_ == 0; });
    region_ = nullptr;
  }

 private:
  Pool() {
    if (const char* wanted = std::getenv("OMP_NUM_THREADS"); wanted && std::atoi(wanted) > 0) size_ = std::atoi(wanted);
    else size_ = os::cores();
    if (size_ < 1) size_ = 1;
  }

  void start_workers() {
    for (const int count = size() - 1; started_ < count; started_++) std::thread([this] { work(); }).detach();
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return region_ && next_ < threads_; });
      const int thread = next_++;
      Region& region = *region_;
      lock.unlock();
      region.run(thread);
      lock.lock();
      if (--unfinished_ == 0) done_.notify_one();
    }
  }

  int size_ = 1, started_ = 0;
  std::mutex one_region_, mutex_;
  std::condition_variable wake_, done_;
  Region* region_ = nullptr;
  int threads_ = 0, next_ = 0, unfinished_ = 0;
};

// By the setting of torch, or of our own pool.
int threads_given() {
  uint32_t count = 1;
  if (const TorchThreads* torch = torch_threads(); torch && torch->get_num_threads(&count) == 0)
    return static_cast<int>(count);
  return Pool::instance().size();
}

// By the quota of CPU time; half a CPU allows one.
int threads_allowed() {
  return static_cast<int>(std::clamp(std::ceil(cpu_quota()), 1.0, static_cast<double>(kMaxThreads)));
}

}  // namespace

bool was_forked() { return forked; }

int num_threads() {
  if (const Team* team = Team::current()) return team->threads();
  return std::min(threads_given(), threads_allowed());
}

void set_num_threads(int threads) {
  check(threads >= 0 && threads <= kMaxThreads, ErrorKind::value, "set_num_threads: threads must be 1..", kMaxThreads,
        ", or 0 for those of the environment, got ", threads);
  check(!torch_threads(), ErrorKind::runtime,
        "set_num_threads: threads are torch's in this process: torch.set_num_threads");
  threads_set = threads;
}

int threads_worth(int64_t products) {
  const int64_t least = Team::current()                  ? kSerialProducts / 8
                        : CrowdedCores::instance().now() ? kCrowdedProducts
                                                         : kSerialProducts;
  return products < least ? 1 : num_threads();
}

std::string threads_source() {
  if (threads_allowed() < threads_given()) return concat("the quota of this process's control group, ", cpu_quota(), " CPUs");
  if (torch_threads()) return forked ? "own pool (this process was forked)" : "torch_parallel_for";
  return loaded_torch() ? "own pool (this torch has no torch_parallel_for: it came with 2.10)"
                        : "own pool (torch is not loaded)";
}

void forget_crowded_cores() { CrowdedCores::instance().forget(); }

int64_t opened_regions() { return opened; }

void parallel_region(int threads, void (*body)(void*, int), void* context) {
  Region region{body, context};
  if (!Team::current() && !teamless) opened++;
  if (Team* team = Team::current()) {
    team->run(threads, region);
  } else if (const TorchThreads* torch = torch_threads(); torch && !forked && !CrowdedCores::instance().now()) {
    auto range = [](int64_t begin, int64_t end, void* r) {
      LOWBIT_HAPPENS_AFTER(r);
      for (int64_t thread = begin; thread < end; thread++) static_cast<Region*>(r)->run(static_cast<int>(thread));
      if (begin == 0) static_cast<Region*>(r)->caller_done = ticks();
      LOWBIT_HAPPENS_BEFORE(r);
    };
    LOWBIT_HAPPENS_BEFORE(&region);
    const int32_t status = torch->parallel_for(0, threads, 1, range, &region);
    LOWBIT_HAPPENS_AFTER(&region);
    if (region.caller_done) CrowdedCores::instance().waited(ticks() - region.caller_done);
    check(status == 0 || region.failed, ErrorKind::runtime, "torch_parallel_for failed with status ", status,
          ": not every part of the work ran");
  } else {
    Pool::instance().run(threads, region);
  }
  if (region.failed) std::rethrow_exception(region.error);
}

void as_team(void (*body)(void*), void* context) {
  const int threads = num_threads();
  if (threads <= 1 || Team::current() || teamless) return body(context);
  if (CrowdedCores::instance().now()) {
    opened++;
    const Teamless each_region_for_itself;
    return body(context);
  }
  Team team(threads);
  parallel(threads, [&](int thread) {
    if (thread) return team.follow();
    struct Leading {
      Team& team;
      explicit Leading(Team& team) : team(team) { Team::current() = &team; }
      ~Leading() { Team::current() = nullptr, team.end(); }
    } leading(team);
    body(context);
  });
}

OnCallerIfCrowded::OnCallerIfCrowded() {
  const TorchThreads* torch = CrowdedCores::instance().now() ? torch_threads() : nullptr;
  if (!torch || !torch->openmp_threads || !torch->set_openmp_threads) return;
  before_ = torch->openmp_threads();
  torch->set_openmp_threads(1);
}

OnCallerIfCrowded::~OnCallerIfCrowded() {
  if (before_) torch_threads()->set_openmp_threads(before_);
}

}  // namespace lowbit
