// Every op case of the CPU backend without packed weights (matmul_test.cc has the others)
// against the reference, and its bits against every other way of computing them: rows alone,
// chunks, thread counts, instruction sets.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/op_cases/op_cases.h"
#include "tests/kernels/cpu/cpu_setting.h"
#include "tests/kernels/op_checks.h"

namespace treadle {
namespace {

class CpuOpsTest : public testing::TestWithParam<std::tuple<CpuIsa, Op>> {
 protected:
  void SetUp() override {
    const std::vector<CpuIsa> here = SupportedIsas();
    if (std::find(here.begin(), here.end(), isa()) == here.end()) {
      GTEST_SKIP() << "this processor cannot run " << Name(isa());
    }
  }

  static CpuIsa isa() { return std::get<0>(GetParam()); }

  static std::vector<const OpCase*> Cases() {
    std::vector<const OpCase*> cases;
    for (const OpCase& op_case : OpCases()) {
      if (op_case.op == std::get<1>(GetParam()) && !op_case.slow) cases.push_back(&op_case);
    }
    return cases;
  }
};

TEST_P(CpuOpsTest, MatchesTheReference) {
  ASSERT_FALSE(Cases().empty());
  const auto backend = MakeCpuBackend({isa(), ComputeMode::kExact}, 2);
  for (const OpCase* op_case : Cases()) {
    const absl::Status status = MatchesReference(*op_case, *backend, ComputeMode::kExact);
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

TEST_P(CpuOpsTest, BitsDependOnTheRowAlone) {
  const auto one_thread = MakeCpuBackend({SupportedIsas().front(), ComputeMode::kExact}, 1);
  const auto three_threads = MakeCpuBackend({isa(), ComputeMode::kExact}, 3);
  for (const OpCase* op_case : Cases()) {
    const absl::Status status = BatchInvariance(*op_case, *three_threads, one_thread.get());
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

// The best instruction set, AMX's tiles where there are any, and the least.
void ExpectAttentionOnTilesAndWithout(ComputeMode mode, bool (*matters)(const OpCase& c)) {
  const std::vector<CpuIsa> isas = SupportedIsas();
  const auto first = MakeCpuBackend({isas.front(), mode}, 1);
  const auto last = MakeCpuBackend({isas.back(), mode}, 3);
  for (OpCase c : OpCases()) {
    if (c.slow || !matters(c)) continue;
    c.bf16 = mode == ComputeMode::kBf16;
    for (const absl::Status& status :
         {MatchesReference(c, *last, mode), BatchInvariance(c, *last, first.get())}) {
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }
}
TEST(CpuBf16Test, AttentionIsTheReferencesOnTilesAndWithout) {
  ExpectAttentionOnTilesAndWithout(ComputeMode::kBf16, [](const OpCase& c) {
    const bool enough = c.kv.page_size == 64 || c.heads == 8;
    return !enough && (c.op == Op::kAttention || c.op == Op::kRotateAndStoreKv);
  });
}
TEST(CpuCodesTest, AttentionIsTheReferencesOnTilesAndWithout) {
  ExpectAttentionOnTilesAndWithout(ComputeMode::kExact, [](const OpCase& c) {
    return c.op == Op::kAttention && c.kv.dtype == DType::kI8;
  });
}

// An op without any case is among them, and fails.
std::vector<Op> OpsWithoutWeights() {
  std::set<Op> ops(std::begin(kOps), std::end(kOps));
  for (const OpCase& op_case : OpCases()) {
    if (op_case.format != nullptr) ops.erase(op_case.op);
  }
  return {ops.begin(), ops.end()};
}

INSTANTIATE_TEST_SUITE_P(Isas, CpuOpsTest,
                         testing::Combine(testing::Values(CpuIsa::kAvx2, CpuIsa::kAvx512),
                                          testing::ValuesIn(OpsWithoutWeights())),
                         [](const testing::TestParamInfo<std::tuple<CpuIsa, Op>>& info) {
                           return std::string(Name(std::get<0>(info.param))) + "_" +
                                  std::string(Name(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace treadle
