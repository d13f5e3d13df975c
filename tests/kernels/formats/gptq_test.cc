// GPTQ's and AWQ's tensors against weights that numpy computes
// (tests/oracles/make_gptq_oracles.py).
#include "kernels/formats/gptq.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/dtype.h"

namespace treadle {
namespace {

using testing::HasSubstr;

void Pieces(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  for (int64_t begin = 0; begin < count; begin += 5) body(begin, std::min(count, begin + 5));
}

struct Case {
  explicit Case(const nlohmann::json& c)
      : qweight(c["qweight"]), qzeros(c["qzeros"]), g_idx(c["g_idx"]), weights(c["weights"]) {
    static const std::map<std::string, GroupPacking> packings = {{"gptq_v1", GroupPacking::kGptqV1},
                                                                 {"gptq_v2", GroupPacking::kGptqV2},
                                                                 {"awq", GroupPacking::kAwq}};
    for (const uint16_t bits : c["scales"]) scales.push_back(ToFloat(Half{bits}));
    tensors.packing = packings.at(c["packing"]);
    tensors.bits = c["bits"];
    tensors.n = c["n"];
    tensors.k = c["k"];
    tensors.group_size = c["group_size"];
    tensors.symmetric = c["symmetric"];
  }
  absl::StatusOr<QuantizedMatrix> Convert() {
    tensors.qweight = qweight;
    tensors.qzeros = qzeros;
    tensors.g_idx = g_idx;
    tensors.scales = scales;
    return ConvertGroupQuantized(tensors, Pieces);
  }
  std::string Error() { return std::string(Convert().status().message()); }

  std::vector<int32_t> qweight, qzeros, g_idx;
  std::vector<float> scales, weights;
  GroupQuantizedTensors tensors;
};

nlohmann::json Cases() {
  return nlohmann::json::parse(std::ifstream(TREADLE_TESTDATA "/gptq_oracles.json"));
}

TEST(Gptq, WeightsAreExact) {
  for (const auto& json : Cases()) {
    for (const bool with_index : {true, false}) {
      Case c(json);
      if (!with_index && !json["in_order"].get<bool>()) continue;
      if (!with_index) c.g_idx.clear();
      const auto matrix = c.Convert();
      ASSERT_TRUE(matrix.ok()) << matrix.status();
      const std::string what = json["packing"].get<std::string>() + json["bits"].dump();
      EXPECT_EQ(matrix->format->code_bits, c.tensors.bits);
      EXPECT_EQ(matrix->constants.input_order.empty(), json["in_order"].get<bool>()) << what;
      // Equal zero points need no room of their own.
      EXPECT_EQ(matrix->constants.zeros.empty(), c.tensors.symmetric) << what;
      std::vector<float> row(static_cast<size_t>(c.tensors.k));
      for (int64_t i = 0; i < c.tensors.n * c.tensors.k; ++i) {
        if (i % c.tensors.k == 0) DecodeSourceRow(matrix->source(), i / c.tensors.k, row.data());
        ASSERT_EQ(row[i % c.tensors.k], c.weights[i]) << what << " " << i;
      }
    }
  }
}

TEST(Gptq, BitsPerWeightCountScalesAndZeros) {
  const auto cases = Cases();
  EXPECT_DOUBLE_EQ(Case(cases[0]).Convert()->BitsPerWeight(), 4 + 20.0 / 32);
  EXPECT_DOUBLE_EQ(Case(cases[6]).Convert()->BitsPerWeight(), 8 + 16.0 / 16);
}

// Columns of a group lie side by side, so that a group is one block: as small as in order.
TEST(Gptq, ActOrderKeepsGroupsWhole) {
  for (const auto& json : Cases()) {
    const auto matrix = Case(json).Convert();
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    const int64_t k = json["k"], group = json["group_size"];
    if (json["in_order"] || k % group != 0 || json["bits"] == 8) continue;
    EXPECT_EQ(matrix->constants.scale_block, group);
    const std::vector<int32_t> g_idx = json["g_idx"];
    const std::vector<int32_t>& order = matrix->constants.input_order;
    for (int64_t i = 0; i < k; ++i) EXPECT_EQ(g_idx[order[i]], i / group) << i;
    for (int64_t i = 1; i < k; ++i) {
      if (i % group != 0) {
        EXPECT_LT(order[i - 1], order[i]) << i;
      }
    }
  }
}

TEST(Gptq, RefusesPiecesThatDisagree) {
  const nlohmann::json json = Cases()[0];  // [24, 64], groups of 32
  const auto error = [&](auto damage) {
    Case c(json);
    damage(c);
    return c.Error();
  };
  EXPECT_EQ(error([](Case&) {}), "");
  EXPECT_THAT(error([](Case& c) { c.qweight.pop_back(); }),
              HasSubstr("qweight has 191 elements, expected [8, 24]"));
  EXPECT_THAT(error([](Case& c) { c.qzeros.push_back(0); }),
              HasSubstr("qzeros has 7 elements, expected [2, 3]"));
  EXPECT_THAT(error([](Case& c) { c.scales.clear(); }),
              HasSubstr("scales has 0 elements, expected [2, 24]"));
  EXPECT_THAT(error([](Case& c) { c.g_idx.pop_back(); }), HasSubstr("g_idx has 63 elements"));
  EXPECT_THAT(error([](Case& c) { c.g_idx[9] = 2; }),
              HasSubstr("g_idx names group 2 at 9, expected 0 to 1"));
  EXPECT_THAT(error([](Case& c) { c.g_idx[9] = -1; }), HasSubstr("group -1 at 9"));
  EXPECT_EQ(error([](Case& c) { std::reverse(c.g_idx.begin(), c.g_idx.end()); }), "");
  EXPECT_THAT(error([](Case& c) { c.scales[3] = NAN; }), HasSubstr("is nan"));
  EXPECT_THAT(error([](Case& c) { c.tensors.group_size = 0; }), HasSubstr("groups of 0"));
  EXPECT_THAT(error([](Case& c) { c.tensors.bits = 3; }), HasSubstr("3 bits, expected 4 or 8"));
  EXPECT_THAT(error([](Case& c) { c.tensors.k = 60; }), HasSubstr("multiples of 8"));
  EXPECT_THAT(error([](Case& c) {
                c.tensors.packing = GroupPacking::kAwq;
                c.tensors.bits = 8;
              }),
              HasSubstr("8 bits, expected 4"));
}

}  // namespace
}  // namespace treadle
