// The settings in which the CPU backend's matrix products are tested: every instruction set, every
// compute mode (VBMI changes nothing but kInt16); what this processor cannot run is skipped, and
// says so.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"

namespace treadle {

struct CpuSetting {
  CpuIsa isa;
  ComputeMode compute;
};

inline std::string SettingName(const testing::TestParamInfo<CpuSetting>& info) {
  return std::string(Name(info.param.isa)) + "_" + std::string(Name(info.param.compute));
}

inline std::unique_ptr<Backend> MakeCpuBackend(const CpuSetting& setting, int threads) {
  auto backend =
      CreateCpuBackend({.threads = threads, .compute = setting.compute, .isa = setting.isa});
  TREADLE_CHECK(backend.ok());
  return *std::move(backend);
}

class CpuSettingTest : public testing::TestWithParam<CpuSetting> {
 protected:
  void SetUp() override {
    const auto isas = SupportedIsas();
    if (std::find(isas.begin(), isas.end(), GetParam().isa) == isas.end()) {
      GTEST_SKIP() << "this processor cannot run " << Name(GetParam().isa);
    }
  }
  std::unique_ptr<Backend> MakeBackend(int threads) { return MakeCpuBackend(GetParam(), threads); }
};

inline auto EveryCpuSetting() {
  return testing::Values(
      CpuSetting{CpuIsa::kAvx2, ComputeMode::kExact}, CpuSetting{CpuIsa::kAvx2, ComputeMode::kInt8},
      CpuSetting{CpuIsa::kAvx2, ComputeMode::kInt16}, CpuSetting{CpuIsa::kAvx2, ComputeMode::kBf16},
      CpuSetting{CpuIsa::kAvxVnni, ComputeMode::kInt8},
      CpuSetting{CpuIsa::kAvxVnni, ComputeMode::kInt16},
      CpuSetting{CpuIsa::kAvx512, ComputeMode::kExact},
      CpuSetting{CpuIsa::kAvx512, ComputeMode::kInt8},
      CpuSetting{CpuIsa::kAvx512, ComputeMode::kInt16},
      CpuSetting{CpuIsa::kAvx512, ComputeMode::kBf16},
      CpuSetting{CpuIsa::kAvx512Vbmi, ComputeMode::kInt16},
      CpuSetting{CpuIsa::kAmx, ComputeMode::kExact}, CpuSetting{CpuIsa::kAmx, ComputeMode::kInt8},
      CpuSetting{CpuIsa::kAmx, ComputeMode::kInt16}, CpuSetting{CpuIsa::kAmx, ComputeMode::kBf16},
      CpuSetting{CpuIsa::kAvx2, ComputeMode::kInt12},
      CpuSetting{CpuIsa::kAvx512, ComputeMode::kInt12},
      CpuSetting{CpuIsa::kAmx, ComputeMode::kInt12}, CpuSetting{CpuIsa::kAvx2, ComputeMode::kMixed},
      CpuSetting{CpuIsa::kAmx, ComputeMode::kMixed});
}

}  // namespace treadle
