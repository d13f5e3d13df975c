// Names of quantized formats.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/status.h"
#include "kernels/formats/quantize.h"

namespace treadle {
namespace {

using testing::HasSubstr;

QuantizeSpec Spec(std::string_view text) {
  auto spec = ParseQuantizeSpec(text);
  TREADLE_CHECK(spec.ok());
  return *std::move(spec);
}

TEST(QuantizeSpec, SpellingsAreCanonical) {
  const std::pair<const char*, const char*> spellings[] = {
      {"nf4", "nf4"},
      {"nf4:64", "nf4"},
      {"nf4-dq:64", "nf4-dq"},
      {"fp4-dq:4096", "fp4-dq:4096"},
      {"int8", "int8"},
      {"kbit-int4", "kbit-int4:64"},
      {"kbit-float4e2:128", "kbit-float4e2:128"},
      {"kbit-e2m1:64", "kbit-e2m1:64"},
      {"kbit-dynamic8:tensor", "kbit-dynamic8:tensor"}};
  for (const auto& [text, name] : spellings) {
    EXPECT_EQ(Spec(text).name, name);
    EXPECT_EQ(Spec(Spec(text).name).name, name);
  }
  const QuantizeSpec spec = Spec("kbit-float5e3:256");
  EXPECT_EQ(spec.format, FindWeightFormat("kbit5"));
  EXPECT_EQ(spec.block, 256);
  EXPECT_EQ(spec.codebook, QuantizeSpec::Codebook::kFloat);
  EXPECT_EQ(spec.exponent_bits, 3);
  EXPECT_TRUE(Spec("nf4-dq").double_quantized);
  EXPECT_EQ(Spec("kbit-int3:tensor").block, 0);
}

TEST(QuantizeSpec, ErrorsNameThePartAndTheChoice) {
  const std::pair<const char*, const char*> errors[] = {
      {"", "'': expected one of int8, nf4"},
      {"nf5", "'nf5': expected one of int8, nf4"},
      {"iq2_s", "expected one of int8"},
      {"int8-dq", "'int8-dq': expected one of"},
      {"int8:64", "int8 has no choice of blocks"},
      {"q8_0:32", "q8_0 has no choice of blocks"},
      {"nf4:", "'nf4:': blocks of '' weights, expected a power of two from 32 to 4096"},
      {"nf4:16", "blocks of '16'"},
      {"nf4:96", "blocks of '96'"},
      {"nf4:8192", "from 32 to 4096"},
      {"nf4:64x", "blocks of '64x'"},
      {"nf4:-64", "blocks of '-64'"},
      {"nf4:tensor", "blocks of 'tensor'"},
      {"kbit-int4:2048", "from 32 to 1024"},
      {"kbit-int9", "'9' bits, expected 3 to 8"},
      {"kbit-int2", "'2' bits"},
      {"kbit-int", "'' bits"},
      {"kbit-cube4", "'kbit-cube4': expected one of"},
      {"kbit-e3m1", "'kbit-e3m1': expected one of"},
      {"kbit-float4", "no exponent bits"},
      {"kbit-float4e4", "'4' exponent bits of 4, expected 1 to 3"},
      {"kbit-float4e0", "'0' exponent bits"},
      {"kbit-int4-dq", "'4-dq' bits"}};
  for (const auto& [text, expected] : errors) {
    EXPECT_THAT(std::string(ParseQuantizeSpec(text).status().message()), HasSubstr(expected))
        << text;
  }
}

}  // namespace
}  // namespace treadle
