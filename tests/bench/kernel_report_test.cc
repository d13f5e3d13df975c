// The kernel benchmark's report of LLM.int8() beside cuBLASLt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "bench/kernels/kernel_bench.h"

namespace treadle {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

KernelBenchReport Example() {
  KernelBenchReport report;
  report.description = "a GPU";
  report.rows = {
      {.name = "up/bf16/rows=32", .rows = 32, .seconds = 60e-6},
      {.name = "up/int8/rows=32", .rows = 32, .seconds = 40e-6, .library_seconds = 50e-6}};
  report.notes = {"down/int8/rows=32: no algorithm"};
  return report;
}

TEST(KernelReport, JsonHasTheLibraryWhereItWasMeasured) {
  const auto json = nlohmann::json::parse(ToJson(Example()));
  EXPECT_FALSE(json["rows"][0].contains("library_seconds"));
  EXPECT_FALSE(json["rows"][0].contains("times_library"));
  EXPECT_DOUBLE_EQ(json["rows"][1]["library_seconds"], 50e-6);
  EXPECT_DOUBLE_EQ(json["rows"][1]["times_library"], 1.25);
  EXPECT_EQ(json["notes"], nlohmann::json({"down/int8/rows=32: no algorithm"}));
}

TEST(KernelReport, TableHasTheLibraryWhereItWasMeasured) {
  KernelBenchReport report = Example();
  EXPECT_THAT(ToTable(report), AllOf(HasSubstr("  1.25 of cuBLASLt int8 + dequantize (50.00 us)\n"),
                                     HasSubstr("takes no outliers out"),
                                     HasSubstr("\ndown/int8/rows=32: no algorithm\n")));
  report.rows.pop_back();
  EXPECT_THAT(ToTable(report), Not(HasSubstr("cuBLASLt")));
}

}  // namespace
}  // namespace treadle
