// The importance of columns over a text: what the first layer reads is a norm of the embedding,
// which can be counted by hand.
#include "bench/quality/importance_of_text.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/bench/quality_case.h"

namespace treadle {
namespace {

std::vector<float> Values(const Checkpoint& checkpoint, const std::string& name) {
  const StoredTensor& tensor = *checkpoint.Find(name);
  std::vector<float> values(static_cast<size_t>(tensor.Elements()));
  tensor.format->decode(tensor.data, tensor.Elements() / tensor.format->block, values.data());
  return values;
}

TEST(ImportanceOfText, IsTheMeanSquareOfWhatMatricesRead) {
  const auto checkpoint = SmallCheckpoint("llama-grouped");
  const ModelConfig& config = checkpoint->config();
  const std::vector<int32_t> tokens = RandomTokens(19, config.vocab);
  double progress = 0;
  const auto importance = ImportanceOfText(*checkpoint, ExactBackend(), tokens, 2,
                                           [&](double part) { progress = part; });
  ASSERT_TRUE(importance.ok()) << importance.status();
  EXPECT_EQ(progress, 1.0);
  // Q, K, V, output, gate, up and down of each layer; nothing of the head.
  EXPECT_EQ(importance->size(), static_cast<size_t>(7 * config.layers));
  const auto embedding = Values(*checkpoint, "model.embed_tokens.weight");
  const auto gain = Values(*checkpoint, "model.layers.0.input_layernorm.weight");
  std::vector<double> expected(static_cast<size_t>(config.hidden));
  for (const int32_t token : tokens) {
    const float* row = embedding.data() + token * config.hidden;
    double squares = 0;
    for (int64_t i = 0; i < config.hidden; ++i) squares += double{row[i]} * row[i];
    const double mean = squares / static_cast<double>(config.hidden) + config.norm_epsilon;
    for (int64_t i = 0; i < config.hidden; ++i) {
      expected[i] += std::pow(row[i] * gain[i], 2) / mean / static_cast<double>(tokens.size());
    }
  }
  for (const char* name : {"blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"}) {
    const std::vector<float> found = importance->Of(name);
    ASSERT_EQ(found.size(), expected.size()) << name;
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_NEAR(found[i], expected[i], 1e-5 * expected[i]);
  }
  EXPECT_EQ(importance->Of("blk.0.ffn_down.weight").size(), static_cast<size_t>(config.ffn_hidden));
  EXPECT_FALSE(ImportanceOfText(*checkpoint, ExactBackend(), {}, 2, {}).ok());
}

}  // namespace
}  // namespace treadle
