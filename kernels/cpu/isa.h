// The instruction set that the CPU backend runs on, chosen once at start.
//
// Each vector source of kernels/cpu is compiled once per instruction set, in namespace TREADLE_ISA
// (a macro that the build sets to avx2, avxvnni or avx512), and reached through a table of
// functions. AVX2 with FMA and F16C is the floor; kAvxVnni adds integer dots of 256 bits (AVX-VNNI:
// Intel's processors for clients since 2021). kAvx512 needs F, BW, VL, DQ and VNNI, whose dots have
// 512. kAvx512Vbmi adds VBMI, and kAmx AMX's tiles of bytes and bf16: no source is compiled again
// for these, the few kernels that use them name their instructions.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

enum class CpuIsa : uint8_t { kAvx2, kAvxVnni, kAvx512, kAvx512Vbmi, kAmx };

std::string_view Name(CpuIsa isa);  // "avx2", "avxvnni", "avx512", "avx512vbmi", "amx"
// Instruction sets of this processor, best last; empty on a processor without AVX2. Asks the
// system's permission for AMX, which is then this process's; where it says no, there is none.
std::vector<CpuIsa> SupportedIsas();
// The best one, or the one that TREADLE_CPU_ISA names; an error if that is unknown or cannot run
// here.
absl::StatusOr<CpuIsa> ChooseIsa();

}  // namespace treadle
