// SPDX-License-Identifier: Apache-2.0
#include "cuda/cublas/matmul.hpp"

#include <bit>
#include <map>
#include <mutex>

#include "core/once.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/libraries.hpp"

namespace lowbit::cuda {
namespace {

using Handle = struct HandleOfCublasLt*;
using Description = struct DescriptionOfCublasLt*;
using Layout = struct LayoutOfCublasLt*;
using Preference = struct PreferenceOfCublasLt*;

// Numbers from cublasLt.h, cublas_api.h and library_types.h (13.5; the same in 12), which tests compare
// with the headers.
enum { kTransposeA = 3 };                      // CUBLASLT_MATMUL_DESC_TRANSA
enum { kMaxWorkspace = 1, kReductions = 3 };  // CUBLASLT_MATMUL_PREF_, likewise
enum { kAlignmentOfA = 5, kAlignmentOfB = 6, kAlignmentOfC = 7, kAlignmentOfD = 8 };
enum { kTransposed = 1, kSumsInFloat32 = 68, kSumsInInt32 = 72 };
enum { kReal32 = 0, kReal16 = 2, kInteger8 = 3, kInteger32 = 10, kRealBfloat16 = 14 };
constexpr uint32_t kReducedIn32Bits = 2;  // split-k sums: not in 16 bits, nor in place, in any order

struct Heuristic {
  std::array<uint64_t, 8> algorithm;
  std::size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

#define LOWBIT_CUBLAS_LT(X)                                                                                            \
  X(create, "cublasLtCreate", Handle* handle)                                                                          \
  X(description_create, "cublasLtMatmulDescCreate", Description* made, int compute, int scale)                         \
  X(description_set, "cublasLtMatmulDescSetAttribute", Description description, int attribute, const void* value,      \
    std::size_t bytes)                                                                                                 \
  X(description_destroy, "cublasLtMatmulDescDestroy", Description description)                                         \
  X(layout_create, "cublasLtMatrixLayoutCreate", Layout* made, int type, uint64_t rows, uint64_t columns,              \
    int64_t stride)                                                                                                    \
  X(layout_destroy, "cublasLtMatrixLayoutDestroy", Layout layout)                                                      \
  X(preference_create, "cublasLtMatmulPreferenceCreate", Preference* made)                                             \
  X(preference_set, "cublasLtMatmulPreferenceSetAttribute", Preference preference, int attribute, const void* value,   \
    std::size_t bytes)                                                                                                 \
  X(preference_destroy, "cublasLtMatmulPreferenceDestroy", Preference preference)                                      \
  X(heuristic, "cublasLtMatmulAlgoGetHeuristic", Handle handle, Description description, Layout a, Layout b, Layout c, \
    Layout d, Preference preference, int wanted, Heuristic* found, int* count)                                         \
  X(matmul, "cublasLtMatmul", Handle handle, Description description, const void* alpha, const void* a, Layout of_a,   \
    const void* b, Layout of_b, const void* beta, const void* c, Layout of_c, void* d, Layout of_d,                    \
    const void* algorithm, void* workspace, std::size_t bytes, void* stream)

struct CublasLt { LOWBIT_CUBLAS_LT(LOWBIT_FUNCTION_MEMBER) };

const CublasLt& cublas() {
  static std::atomic<const CublasLt*> kept{nullptr};
  return made_once(kept, [] {
    const Library& found = library(LibraryName::cublas_lt);
    return CublasLt{LOWBIT_CUBLAS_LT(LOWBIT_FUNCTION_FOUND)};
  });
}

void ensure_cublas(int status, std::string_view what) {
  check(status == 0, ErrorKind::runtime, what, " failed: status ", status, " of cuBLAS");
}

// cuBLAS is column-major: its A is w as [k, n], transposed; its B is x as [k, m]; its D is y as [n, m].
class Described {
 public:
  explicit Described(const DenseProduct& matmul) {
    const bool codes = matmul.dtype == DType::int8;
    const int type = codes ? kInteger8 : matmul.dtype == DType::float16 ? kReal16 : kRealBfloat16;
    const int sum = codes ? kInteger32 : kReal32;
    const int32_t transposed = kTransposed;
    ensure_cublas(cublas().description_create(&description, codes ? kSumsInInt32 : kSumsInFloat32, sum),
                  "cublasLtMatmulDescCreate");
    ensure_cublas(cublas().description_set(description, kTransposeA, &transposed, sizeof transposed),
                  "cublasLtMatmulDescSetAttribute");
    create(a, type, matmul.k, matmul.n, matmul.k), create(b, type, matmul.k, matmul.m, matmul.k);
    create(d, matmul.is_narrow ? type : sum, matmul.n, matmul.m, matmul.y_row);
  }
  ~Described() {
    for (const Layout layout : {a, b, d})
      if (layout) cublas().layout_destroy(layout);
    cublas().description_destroy(description);
  }
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;

  Description description = nullptr;
  Layout a = nullptr, b = nullptr, d = nullptr;

 private:
  static void create(Layout& layout, int type, int64_t rows, int64_t columns, int64_t stride) {
    ensure_cublas(cublas().layout_create(&layout, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                                         stride),
                  "cublasLtMatrixLayoutCreate");
  }
};

uint32_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data) | 256;
  return uint32_t{1} << std::countr_zero(address);
}

std::array<uint32_t, 3> alignments(const DenseProduct& matmul) {
  return {alignment_of(matmul.w), alignment_of(matmul.x), alignment_of(matmul.y)};
}

Handle handle_of(Device device) {
  static std::array<std::atomic<const Handle*>, 64> kept{};
  return made_once(kept[static_cast<std::size_t>(device.index) % kept.size()], [] {
    Handle made = nullptr;
    ensure_cublas(cublas().create(&made), "cublasLtCreate");
    return made;
  });
}

MatmulAlgorithm find(const Place& place, const DenseProduct& matmul) {
  if (!library(LibraryName::cublas_lt).handle) return {.refused = library(LibraryName::cublas_lt).missing};
  const InContext here(place.device);
  const Described described(matmul);
  Preference preference = nullptr;
  ensure_cublas(cublas().preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  const auto set = [&](int attribute, const auto& value) {
    ensure_cublas(cublas().preference_set(preference, attribute, &value, sizeof value),
                  "cublasLtMatmulPreferenceSetAttribute");
  };
  const auto [of_w, of_x, of_y] = alignments(matmul);
  set(kMaxWorkspace, kMatmulWorkspace), set(kReductions, kReducedIn32Bits), set(kAlignmentOfA, of_w);
  set(kAlignmentOfB, of_x), set(kAlignmentOfC, of_y), set(kAlignmentOfD, of_y);
  Heuristic found{};
  int count = 0;
  const int status = cublas().heuristic(handle_of(place.device), described.description, described.a, described.b,
                                        described.d, described.d, preference, 1, &found, &count);
  cublas().preference_destroy(preference);
  if (status != 0 || count == 0)
    return {.refused = concat("cuBLAS has no algorithm for these sizes and alignments (status ", status, ")")};
  return {.data = found.algorithm};
}

struct Algorithms {
  using Key = std::tuple<int16_t, int64_t, int64_t, int64_t, int64_t, DType, bool, std::array<uint32_t, 3>>;
  mutable std::mutex mutex;
  mutable std::map<Key, MatmulAlgorithm> found;  // nodes never move
};

}  // namespace

const MatmulAlgorithm& algorithm_for(const Place& place, const DenseProduct& matmul) {
  static std::atomic<const Algorithms*> kept{nullptr};
  const Algorithms& algorithms = made_once(kept, [] { return Algorithms(); });
  const Algorithms::Key key{place.device.index, matmul.m, matmul.n, matmul.k, matmul.y_row, matmul.dtype,
                            matmul.is_narrow, alignments(matmul)};
  const std::lock_guard lock(algorithms.mutex);
  const auto found = algorithms.found.find(key);
  if (found != algorithms.found.end()) return found->second;
  return algorithms.found.try_emplace(key, find(place, matmul)).first->second;
}

void run(const Place& place, const DenseProduct& matmul, void* workspace) {
  const MatmulAlgorithm& algorithm = algorithm_for(place, matmul);
  check(algorithm.refused.empty(), ErrorKind::runtime, algorithm.refused);
  const Described described(matmul);
  const uint32_t one = matmul.dtype == DType::int8 ? 1 : std::bit_cast<uint32_t>(1.0f), zero = 0;
  ensure_cublas(cublas().matmul(handle_of(place.device), described.description, &one, matmul.w, described.a, matmul.x,
                                described.b, &zero, matmul.y, described.d, matmul.y, described.d,
                                algorithm.data.data(), workspace, kMatmulWorkspace, place.stream),
                concat(name_of(place.device), ": cublasLtMatmul of ", matmul.m, " x ", matmul.n, " x ", matmul.k));
}

}  // namespace lowbit::cuda
