// SPDX-License-Identifier: Apache-2.0
#include "core/isa.hpp"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "core/once.hpp"
#include "core/os.hpp"

namespace lowbit {
namespace {

// Bits of cpuid and of the register state that the OS saves (xcr0); of Arm, bits of our own. One set includes another if
// it has all of its bits.
struct Features {
  uint32_t ecx1 = 0;                      // leaf 1
  uint32_t ebx7 = 0, ecx7 = 0, edx7 = 0;  // leaf 7
  uint32_t eax71 = 0;                     // leaf 7, subleaf 1
  uint32_t xcr0 = 0;
  uint32_t arm = 0;                       // ArmBits
  bool of_amd = false;

  constexpr Features operator|(const Features& o) const {
    return {ecx1 | o.ecx1, ebx7 | o.ebx7, ecx7 | o.ecx7, edx7 | o.edx7, eax71 | o.eax71, xcr0 | o.xcr0,
            arm | o.arm, of_amd || o.of_amd};
  }
  constexpr bool contains(const Features& o) const {
    return (ecx1 & o.ecx1) == o.ecx1 && (ebx7 & o.ebx7) == o.ebx7 && (ecx7 & o.ecx7) == o.ecx7 &&
           (edx7 & o.edx7) == o.edx7 && (eax71 & o.eax71) == o.eax71 && (xcr0 & o.xcr0) == o.xcr0 && (arm & o.arm) == o.arm &&
           of_amd >= o.of_amd;
  }
};

constexpr Features kNone{};
#if defined(__aarch64__)
enum ArmBits : uint32_t { kAsimd = 1, kDotProd = 2, kInt8Matrix = 4, kBf16Matrix = 8 };
constexpr Features kNeon{.arm = kAsimd};
constexpr Features kNeonDot = kNeon | Features{.arm = kDotProd};
constexpr Features kNeonI8mm = kNeonDot | Features{.arm = kInt8Matrix};
constexpr Features kNeonBf16 = kNeonI8mm | Features{.arm = kBf16Matrix};  // no processor has this without i8mm
#else
constexpr uint32_t kOsxsave = 1u << 27;
constexpr Features kAvx2{.ecx1 = 1u << 12 | 1u << 29 | kOsxsave, .ebx7 = 1u << 5, .xcr0 = 0x6};  // with fma and f16c
constexpr Features kAvx2Vnni = kAvx2 | Features{.eax71 = 1u << 4};
// The bits of ebx7: f, dq, bw, vl.
constexpr Features kAvx512 = kAvx2 | Features{.ebx7 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, .xcr0 = 0xe6};
constexpr Features kAvx512Vnni = kAvx512 | Features{.ecx7 = 1u << 11};
// A vdpbf16ps takes as long as four FMAs on Intel (Sapphire Rapids), as long as one on AMD.
constexpr Features kAvx512Bf16 = kAvx512Vnni | Features{.eax71 = 1u << 5, .of_amd = true};
// AMX's tiles, bf16 and int8, and AVX512_BF16
constexpr Features kAmx =
    kAvx512Vnni | Features{.edx7 = 1u << 22 | 1u << 24 | 1u << 25, .eax71 = 1u << 5, .xcr0 = 0x600e6};
#endif

struct Isa {
  std::string_view name;
  Features needs;
};

// Best first, as in csrc/cpu/CMakeLists.txt.
constexpr Isa kIsas[] = {
#if defined(__aarch64__)
    {"neon_bf16", kNeonBf16},
    {"neon_i8mm", kNeonI8mm},
    {"neon_dot", kNeonDot},
    {"neon", kNeon},
#else
    {"amx", kAmx},
    {"avx512_bf16", kAvx512Bf16},
    {"avx512_vnni", kAvx512Vnni},
    {"avx512", kAvx512},
    {"avx2_vnni", kAvx2Vnni},
    {"avx2", kAvx2},
#endif
    {"scalar", kNone},
};

#if defined(__aarch64__)
uint32_t arm_bits() {
  uint32_t found = 0;
  if (os::has(os::ArmFeature::simd)) found |= kAsimd;
  if (os::has(os::ArmFeature::dot_product)) found |= kDotProd;
  if (os::has(os::ArmFeature::int8_matrix_product)) found |= kInt8Matrix;
  if (os::has(os::ArmFeature::bfloat16)) found |= kBf16Matrix;
  return found;
}
#endif

const Features& detected() {
  static std::atomic<const Features*> kept{nullptr};
  return made_once(kept, [] {
    Features found;
#if defined(__x86_64__)
    uint32_t eax, ebx, edx, high, vendor[3];
    __get_cpuid(0, &eax, &vendor[0], &vendor[2], &vendor[1]);
    found.of_amd = std::memcmp(vendor, "AuthenticAMD", 12) == 0 || std::memcmp(vendor, "HygonGenuine", 12) == 0;
    __get_cpuid(1, &eax, &ebx, &found.ecx1, &edx);
    __get_cpuid_count(7, 0, &eax, &found.ebx7, &found.ecx7, &found.edx7);
    __get_cpuid_count(7, 1, &found.eax71, &high, &high, &high);
    if (found.ecx1 & kOsxsave) __asm__ volatile("xgetbv" : "=a"(found.xcr0), "=d"(high) : "c"(0));
    if (found.contains(kAmx) && !os::allows_tiles()) found.edx7 = 0;
#elif defined(__aarch64__)
    found.arm = arm_bits();
#endif
    return found;
  });
}

std::string_view wanted() {
  const char* name = std::getenv("LOWBIT_ISA");
  return name ? name : "";
}

// The instruction set named by LOWBIT_ISA, or null.
const Isa* limit() {
  static std::atomic<const Isa* const*> kept{nullptr};
  return made_once(kept, []() -> const Isa* {
    if (wanted().empty()) return nullptr;
    std::string names;
    for (const Isa& isa : kIsas) {
      if (isa.name == wanted()) return &isa;
      names += concat(names.empty() ? "" : ", ", isa.name);
    }
    throw Error(ErrorKind::value, concat("LOWBIT_ISA must be one of ", names, ", got '", wanted(), "'"));
  });
}

bool is_detected(const Isa& isa) { return detected().contains(isa.needs); }
bool is_left(const Isa& isa) { return !limit() || limit()->needs.contains(isa.needs); }

}  // namespace

std::string_view detected_isa() {
  for (const Isa& isa : kIsas)
    if (is_detected(isa)) return isa.name;
  return "";
}

std::string_view chosen_isa() {
  for (const Isa& isa : kIsas)
    if (is_detected(isa) && is_left(isa)) return isa.name;
  return "";
}

std::string isa_reason() {
  if (!limit() || limit()->name == detected_isa()) return "";
  if (chosen_isa() != detected_isa()) return concat("LOWBIT_ISA=", limit()->name, " lowers it from ", detected_isa());
  return concat("LOWBIT_ISA=", limit()->name, " cannot raise it above ", detected_isa());
}

std::string isa_unavailable(std::string_view name) {
  for (const Isa& isa : kIsas) {
    if (isa.name != name) continue;
    Features instructions = isa.needs;
    instructions.of_amd = false;
    if (!is_detected(isa) && detected().contains(instructions)) return "its products are slow on this processor";
    if (!is_detected(isa)) return concat("this machine has ", detected_isa(), " only");
    return is_left(isa) ? "" : concat("LOWBIT_ISA lowers this machine to ", chosen_isa());
  }
  return concat("csrc/core/isa.cpp does not know ", name);
}

bool reads_in_streams() {
#if defined(__x86_64__)
  static std::atomic<const bool*> kept{nullptr};
  return made_once(kept, [] {
    uint32_t eax, ebx, ecx, edx;
    return __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == 0x756e6547 && edx == 0x49656e69 && ecx == 0x6c65746e;
  });  // "GenuineIntel"
#else
  return false;
#endif
}

bool reads_through_l2() { return detected().of_amd; }

}  // namespace lowbit
