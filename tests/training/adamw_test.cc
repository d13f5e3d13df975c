// AdamW, its bound, warm-up and cosine against torch.optim.AdamW, clip_grad_norm_ and transformers'
// schedule in float32 (tests/oracles/make_training_oracles.py). Ten steps of a few roundings each:
// within 1e-6 of numbers near 1.
#include "training/adamw.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/test_folder.h"
#include "tests/training/oracles.h"

namespace treadle {
namespace {

TEST(AdamW, IsPytorchs) {
  const auto oracle = ReadTrainingOracles()["adamw"];
  const AdamWOptions options = {
      .learning_rate = 0.01, .weight_decay = 0.1, .max_gradient_norm = 1, .warmup = 3, .steps = 10};
  ThreadPool pool(2);
  std::vector<float> values = Floats(oracle["begin"]);
  const auto adam = AdamW::Create(options, values.size(), OwnFolder().path(), pool);
  ASSERT_TRUE(adam.ok()) << adam.status();
  for (int64_t step = 0; step < 10; ++step) {
    EXPECT_NEAR(LearningRateAt(options, step), oracle["rates"][step].get<double>(), 1e-12) << step;
    const std::vector<float> given = Floats(oracle["given"][step]);
    double squares = 0;
    for (const float g : given) squares += double{g} * g;
    EXPECT_DOUBLE_EQ((*adam)->Step(step, values, given), std::sqrt(squares));
  }
  const std::vector<float> end = Floats(oracle["end"]);
  for (size_t i = 0; i < end.size(); ++i) EXPECT_NEAR(values[i], end[i], 1e-6) << i;
  EXPECT_TRUE(std::filesystem::is_empty(OwnFolder().path())) << "the moments' file has no name";
}

TEST(AdamW, SaysWhereItCannotKeepItsMoments) {
  ThreadPool pool(1);
  const auto adam = AdamW::Create({}, 7, "/nowhere", pool);
  ASSERT_FALSE(adam.ok());
  EXPECT_NE(std::string(adam.status().message()).find("/nowhere: cannot be written to"),
            std::string::npos);
}

}  // namespace
}  // namespace treadle
