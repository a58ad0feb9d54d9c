// SPDX-License-Identifier: Apache-2.0
#include "core/isa.hpp"

#include <cstdint>
#include <cstdlib>

#include "core/error.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lowbit {
namespace {

struct Level {
  Isa isa;
  std::string_view name;
  uint32_t ecx1, ebx7, ecx7;  // bits needed in cpuid leaf 1 ecx, leaf 7 ebx, leaf 7 ecx
  uint32_t xcr0;              // register state that the OS must save
};

constexpr uint32_t kFma = 1u << 12, kF16c = 1u << 29, kOsxsave = 1u << 27, kAvx2 = 1u << 5;
constexpr uint32_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // f, dq, bw, vl
constexpr uint32_t kVnni = 1u << 11;
constexpr uint32_t kYmmState = 0x6, kZmmState = 0xe6;

// One row per level, best last.
constexpr Level kLevels[] = {
    {Isa::scalar, "scalar", 0, 0, 0, 0},
    {Isa::avx2, "avx2", kFma | kF16c | kOsxsave, kAvx2, 0, kYmmState},
    {Isa::avx512, "avx512", kFma | kF16c | kOsxsave, kAvx2 | kAvx512, 0, kZmmState},
    {Isa::avx512_vnni, "avx512_vnni", kFma | kF16c | kOsxsave, kAvx2 | kAvx512, kVnni, kZmmState},
};

Isa detect() {
  Isa best = Isa::scalar;
#if defined(__x86_64__)
  uint32_t eax, ebx, ecx1, ebx7, ecx7, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx1, &edx) || !__get_cpuid_count(7, 0, &eax, &ebx7, &ecx7, &edx)) return best;
  uint32_t xcr0 = 0, high;
  if (ecx1 & kOsxsave) __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
  for (const Level& level : kLevels)
    if ((ecx1 & level.ecx1) == level.ecx1 && (ebx7 & level.ebx7) == level.ebx7 && (ecx7 & level.ecx7) == level.ecx7 &&
        (xcr0 & level.xcr0) == level.xcr0)
      best = level.isa;
#endif
  return best;
}

Isa choose() {
  const char* wanted = std::getenv("LOWBIT_ISA");
  if (!wanted || !*wanted) return detected_isa();
  for (const Level& level : kLevels)
    if (level.name == wanted) return level.isa < detected_isa() ? level.isa : detected_isa();
  throw Error(ErrorKind::value, concat("LOWBIT_ISA must be scalar, avx2, avx512 or avx512_vnni, got '", wanted, "'"));
}

}  // namespace

std::string_view name_of(Isa isa) { return kLevels[static_cast<int>(isa)].name; }

Isa detected_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa chosen_isa() {
  static const Isa isa = choose();
  return isa;
}

std::string isa_reason() {
  const char* wanted = std::getenv("LOWBIT_ISA");
  if (!wanted || !*wanted) return "";
  if (chosen_isa() < detected_isa()) return concat("LOWBIT_ISA=", wanted, " lowers it from ", name_of(detected_isa()));
  return wanted == name_of(detected_isa()) ? "" : concat("LOWBIT_ISA=", wanted, " cannot raise it above ", name_of(detected_isa()));
}

}  // namespace lowbit
