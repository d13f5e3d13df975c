#include "kernels/cpu/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "base/status.h"

namespace treadle {
namespace {

struct IsaRow {
  CpuIsa isa;
  std::string_view name;
  std::string_view needs;
  bool (*supported)();
};

// Not every compiler's __builtin_cpu_supports knows it.
bool HasF16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c() &&
         __builtin_cpu_supports("bmi2");
}

// cpuid.h has a name for each compiler.
bool HasAvxVnni() {
  constexpr unsigned kAvxVnni = 1u << 4;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return HasAvx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kAvxVnni) != 0;
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

bool HasAvx512Vbmi() { return HasAvx512() && __builtin_cpu_supports("avx512vbmi"); }

// Linux gives the registers to those who ask (arch_prctl(2)), if processor and hypervisor have
// them.
bool HasAmx() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  // Tiles, their products of bytes and of bf16; cpuid.h has a name for each compiler.
  constexpr unsigned kTiles = 1u << 24 | 1u << 25 | 1u << 22;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return HasAvx512Vbmi() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
         (edx & kTiles) == kTiles && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 &&
         (eax & kAvx512Bf16) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

constexpr IsaRow kIsas[] = {
    {CpuIsa::kAvx2, "avx2", "AVX2, FMA, F16C and BMI2", HasAvx2},
    {CpuIsa::kAvxVnni, "avxvnni", "AVX-VNNI, and what avx2 needs", HasAvxVnni},
    {CpuIsa::kAvx512, "avx512", "AVX-512 F, BW, VL, DQ and VNNI", HasAvx512},
    {CpuIsa::kAvx512Vbmi, "avx512vbmi", "AVX-512 F, BW, VL, DQ, VNNI and VBMI", HasAvx512Vbmi},
    {CpuIsa::kAmx, "amx", "AMX with bytes and bf16, AVX-512 BF16, and what avx512vbmi needs",
     HasAmx},
};

}  // namespace

std::string_view Name(CpuIsa isa) {
  for (const IsaRow& row : kIsas) {
    if (row.isa == isa) return row.name;
  }
  return "?";
}

std::vector<CpuIsa> SupportedIsas() {
  std::vector<CpuIsa> isas;
  for (const IsaRow& row : kIsas) {
    if (row.supported()) isas.push_back(row.isa);
  }
  return isas;
}

absl::StatusOr<CpuIsa> ChooseIsa() {
  const char* forced = std::getenv("TREADLE_CPU_ISA");
  if (forced != nullptr && *forced != '\0') {
    for (const IsaRow& row : kIsas) {
      if (row.name != forced) continue;
      if (row.supported()) return row.isa;
      return InvalidArgument("TREADLE_CPU_ISA is '", forced, "', but this processor lacks some of ",
                             row.needs);
    }
    return InvalidArgument("TREADLE_CPU_ISA is '", forced,
                           "', expected avx2, avxvnni, avx512, avx512vbmi or amx");
  }
  const std::vector<CpuIsa> isas = SupportedIsas();
  if (isas.empty()) {
    return absl::FailedPreconditionError(
        Str("this processor cannot run the CPU backend: expected ", kIsas[0].needs));
  }
  return isas.back();
}

}  // namespace treadle
