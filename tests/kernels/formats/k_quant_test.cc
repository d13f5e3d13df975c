// GGUF's searched blocks against llama.cpp's quantizers (tests/oracles/make_k_quant_oracles.py),
// bit for bit, with importance and without.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "base/sha256.h"
#include "base/status.h"
#include "kernels/formats/quantize.h"
#include "tests/kernels/formats/oracle_values.h"

namespace treadle {
namespace {

void Whole(int64_t count, const std::function<void(int64_t, int64_t)>& body) { body(0, count); }

TEST(KQuants, EqualLlamaCpps) {
  const auto rows = nlohmann::json::parse(std::ifstream(TREADLE_TESTDATA "/k_quant_oracles.json"));
  std::set<std::string> formats;
  for (const auto& row : rows) {
    SCOPED_TRACE(row.dump());
    const std::string format = row[0], kind = row[1];
    const int64_t n = row[3], k = row[4];
    std::vector<float> importance;
    if (const uint32_t seed = row[5]; seed > 0) {
      importance = OracleValues("smooth", seed, k);
      for (float& value : importance) value = std::fabs(value) + 0x1p-10f;
    }
    const QuantizeSpec spec = ParseQuantizeSpec(format).value();
    const auto matrix = Quantize(spec, OracleValues(kind, row[2], n * k), n, k, Whole, importance);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    Sha256 sum;
    sum.Add(matrix->data);
    EXPECT_EQ(sum.Finish(), row[6].get<std::string>());
    formats.insert(format);
  }
  EXPECT_EQ(formats.size(), 11u);
}

}  // namespace
}  // namespace treadle
