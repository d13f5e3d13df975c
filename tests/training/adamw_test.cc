// AdamW, its bound, warm-up and cosine against torch.optim.AdamW, clip_grad_norm_ and transformers'
// schedule in float32 (tests/oracles/make_training_oracles.py). Ten steps of a few roundings each:
// within 1e-6 of numbers near 1. 8-bit moments against bitsandbytes' AdamW8bit.
#include "training/adamw.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/assert_ok.h"
#include "tests/support/oracles.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

TEST(AdamW, IsPytorchs) {
  const auto oracle = ReadOracles("training_oracles.json")["adamw"];
  const AdamWOptions options = {
      .learning_rate = 0.01, .weight_decay = 0.1, .max_gradient_norm = 1, .warmup = 3, .steps = 10};
  ThreadPool pool(2);
  std::vector<float> values = Floats(oracle["begin"]);
  const size_t tensors[] = {3, 4};
  ASSERT_OK_AND_ASSIGN(const auto adam, AdamW::Create(options, tensors, OwnFolder().path(), pool));
  for (int64_t step = 0; step < 10; ++step) {
    EXPECT_NEAR(LearningRateAt(options, step), oracle["rates"][step].get<double>(), 1e-12) << step;
    const std::vector<float> given = Floats(oracle["given"][step]);
    double squares = 0;
    for (const float g : given) squares += double{g} * g;
    EXPECT_DOUBLE_EQ(adam->Step(step, values, given), std::sqrt(squares));
  }
  const std::vector<float> end = Floats(oracle["end"]);
  for (size_t i = 0; i < end.size(); ++i) EXPECT_NEAR(values[i], end[i], 1e-6) << i;
  EXPECT_TRUE(std::filesystem::is_empty(OwnFolder().path())) << "the moments' file has no name";
}

// wave() of the oracles' script.
float Wave(size_t i, double phase) {
  return static_cast<float>(std::sin(static_cast<double>(i) * 0.7 + phase));
}

// A moment whose last bit is another may be rounded to the next code: a fifth of a percent may. Its
// number's steps then differ by what the map leaves out, 1.4 % of a step of 0.01 at most.
TEST(AdamW, OfEightBitsIsThatOfBitsandbytes) {
  const auto oracle = ReadOracles("training_oracles.json")["adamw8bit"];
  const auto sizes = oracle["sizes"].get<std::vector<size_t>>();
  const AdamWOptions options = {.eight_bit = true,
                                .learning_rate = 0.01,
                                .weight_decay = 0.1,
                                .max_gradient_norm = 0,
                                .warmup = 3,
                                .steps = 10};
  std::vector<float> first;
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    ASSERT_OK_AND_ASSIGN(const auto adam, AdamW::Create(options, sizes, OwnFolder().path(), pool));
    EXPECT_EQ(adam->moments().size(), 2 * sizes[0] + 2 * 17 * 4 + 2 * sizes[1] * 4);
    std::vector<float> values, gradients(sizes[0] + sizes[1]);
    for (const size_t size : sizes) {
      for (size_t i = 0; i < size; ++i) values.push_back(Wave(i, 1));
    }
    for (int step = 0; step < 10; ++step) {
      for (size_t at = 0; at < gradients.size(); ++at) {
        const size_t i = at < sizes[0] ? at : at - sizes[0];
        const double size = std::pow(10.0, -static_cast<double>(i % 5));
        gradients[at] =
            static_cast<float>(std::sin(static_cast<double>(i) * 0.7 + step * 0.37) * size);
      }
      adam->Step(step, values, gradients);
    }
    if (!first.empty()) {
      EXPECT_EQ(values, first);
    }
    first = values;
    const auto codes = adam->moments().subspan(2 * 17 * 4);
    int64_t others = 0, count = 0;
    for (size_t moment = 0; moment < 2; ++moment) {
      const auto expected = oracle["codes"][moment].get<std::vector<int>>();
      for (size_t i = 0; i < expected.size(); ++i, ++count) {
        const int found = static_cast<int>(codes[moment * sizes[0] + 7 * i]);
        EXPECT_LE(std::abs(found - expected[i]), 1) << moment << " " << i;
        others += found == expected[i] ? 0 : 1;
      }
    }
    EXPECT_LE(others, count / 500);
    const std::vector<float> end = Floats(oracle["end"]);
    int64_t apart = 0;
    for (size_t i = 0; i < end.size(); ++i) {
      apart += std::abs(values[7 * i] - end[i]) > 1e-6 ? 1 : 0;
      EXPECT_NEAR(values[7 * i], end[i], 0.014 * 0.01 * 10) << i;
    }
    EXPECT_LE(apart, std::ssize(end) / 500);
  }
}

TEST(AdamW, SaysWhereItCannotKeepItsMoments) {
  ThreadPool pool(1);
  const size_t tensors[] = {7};
  const auto adam = AdamW::Create({}, tensors, "/nowhere", pool);
  ASSERT_FALSE(adam.ok());
  EXPECT_NE(std::string(adam.status().message()).find("/nowhere: cannot be written to"),
            std::string::npos);
}

}  // namespace
}  // namespace treadle
