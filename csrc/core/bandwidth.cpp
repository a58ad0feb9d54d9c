// SPDX-License-Identifier: Apache-2.0
#include "core/bandwidth.hpp"

#include <chrono>
#include <memory>

#include "core/parallel.hpp"

namespace lowbit {
namespace {

constexpr int64_t kLine = 8;  // uint64 in a cache line
constexpr int kMaxStreams = 8;
constexpr int64_t kAhead = 16 * kLine;  // prefetch distance: 1 KiB

uint64_t sum_streams(const uint64_t* data, int64_t stream_length, int streams) {
  uint64_t sums[kMaxStreams][kLine] = {};
  for (int64_t i = 0; i + kLine <= stream_length; i += kLine)
    for (int stream = 0; stream < streams; stream++) {
      const uint64_t* line = data + stream * stream_length + i;
      __builtin_prefetch(line + kAhead);
      for (int64_t j = 0; j < kLine; j++) sums[stream][j] += line[j];
    }
  uint64_t total = 0;
  for (auto& stream : sums)
    for (uint64_t sum : stream) total += sum;
  return total;
}

}  // namespace

double read_bandwidth(int64_t bytes, int streams, int threads, int repeats) {
  check(bytes >= 1 << 20 && streams >= 1 && streams <= kMaxStreams && threads >= 1 && repeats >= 1, ErrorKind::value,
        "read_bandwidth: wanted bytes >= 1 MiB, streams 1..8, threads >= 1, repeats >= 1, got bytes=", bytes,
        " streams=", streams, " threads=", threads, " repeats=", repeats);
  const int64_t stream_length = bytes / 8 / (streams * threads) / kLine * kLine, share = stream_length * streams;
  const auto data = std::make_unique<uint64_t[]>(share * threads + kAhead);
  for (int64_t i = 0; i < share * threads; i++) data[i] = static_cast<uint64_t>(i);
  std::atomic<uint64_t> sink{0};
  double best = 0;
  for (int repeat = 0; repeat < repeats; repeat++) {
    const auto begin = std::chrono::steady_clock::now();
    parallel(threads, [&](int thread) { sink += sum_streams(data.get() + thread * share, stream_length, streams); });
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    const double rate = static_cast<double>(share * threads * 8) / time.count() / 1e9;
    best = rate > best ? rate : best;
  }
  return best;
}

}  // namespace lowbit
