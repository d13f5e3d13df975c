// Random rows of logits and what is asked of them, with everything that can go wrong; and the
// comparison of what two samplers make of them. Tests only.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/sampling.h"
#include "kernels/tensor.h"

namespace treadle {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

enum class Shape { kPeaked, kFlat, kTies, kEqual, kSpecial, kNothing };
inline constexpr Shape kShapes[] = {Shape::kPeaked, Shape::kFlat,    Shape::kTies,
                                    Shape::kEqual,  Shape::kSpecial, Shape::kNothing};

inline std::vector<float> RandomLogits(Shape shape, int64_t vocab, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> logits(vocab);
  for (float& x : logits) {
    x = normal(random) * (shape == Shape::kFlat ? 0.1f : 3.0f);
    if (shape == Shape::kPeaked && random() % 64 == 0) x += 12.0f;
    if (shape == Shape::kTies) x = std::round(x);
    if (shape == Shape::kEqual) x = random() % 4 == 0 ? -0.0f : 0.0f;
    if (shape == Shape::kSpecial && random() % 8 == 0) {
      const float special[] = {kNaN, -kInfinity, kInfinity, -3e38f, 0.0f, -0.0f};
      x = special[random() % std::size(special)];
    }
    if (shape == Shape::kNothing) x = random() % 2 == 0 ? kNaN : -kInfinity;
  }
  return logits;
}

// A row's question with what it points to.
struct Question {
  SamplingParameters parameters;
  std::vector<TokenCount> counts;
  std::vector<int32_t> suppressed;
  std::vector<uint32_t> mask;
  SampleRow row;
};

class Questioner {
 public:
  Questioner(int64_t vocab, std::mt19937& random) : vocab_(vocab), random_(random) {}

  std::unique_ptr<Question> Next() {
    auto question = std::make_unique<Question>();
    FillParameters(question->parameters);
    if (OneIn(3)) FillCounts(*question);
    if (OneIn(4)) FillBiases(question->parameters);
    if (OneIn(4)) question->suppressed = {Token(), Token(), Token()};
    if (OneIn(4)) FillMask(question->mask);
    SampleRow& row = question->row;
    row.parameters = OneIn(10) ? nullptr : &question->parameters;
    row.counts = question->counts;
    row.suppressed = question->suppressed;
    row.mask = question->mask.empty() ? nullptr : question->mask.data();
    row.candidate = random_() % 3;
    row.position = static_cast<int64_t>(random_()) << (random_() % 20);
    if (OneIn(2)) {
      row.top_logprobs = static_cast<int32_t>(random_() % (kMaxTopLogprobs + 1));
      row.target = OneIn(2) ? Token() : -1;
    }
    return question;
  }

 private:
  bool OneIn(uint32_t n) { return random_() % n == 0; }
  int32_t Token() { return static_cast<int32_t>(random_() % vocab_); }
  template <typename T, size_t n>
  T OneOf(const T (&choices)[n]) {
    return choices[random_() % n];
  }

  void FillParameters(SamplingParameters& p) {
    p.temperature = OneOf({0.0f, 1e-3f, 0.3f, 0.7f, 1.0f, 2.5f, 40.0f});
    if (OneIn(2)) p.top_k = OneOf({1, 2, 5, 40, 63, 64, 65, 300, 1000, 1 << 30});
    if (OneIn(2)) p.top_p = OneOf({0.95f, 0.5f, 0.03f, 1e-6f, 1e-30f});
    if (OneIn(3)) p.min_p = OneOf({0.05f, 1e-5f, 0.4f, 1.0f});
    p.seed = (uint64_t{random_()} << 32) | random_();
  }
  void FillCounts(Question& question) {
    question.parameters.repetition_penalty = OneOf({1.3f, 0.7f, 1.0f});
    question.parameters.presence_penalty = OneOf({0.5f, -1.0f, 0.0f});
    question.parameters.frequency_penalty = OneOf({0.25f, -0.1f, 0.0f});
    const int64_t step = 1 + static_cast<int64_t>(random_() % 40);
    for (int64_t token = 0; token < vocab_; token += step) {
      const auto count = static_cast<int32_t>(random_() % 3);
      question.counts.push_back({static_cast<int32_t>(token), 1 + count, 2 - count});
    }
  }
  void FillBiases(SamplingParameters& p) {
    const int32_t often = Token();
    p.logit_bias = {{often, 1e-3f}, {Token(), -kInfinity}, {often, 2.5f},
                    {often, -1e7f}, {Token(), 3.0f},       {often, 1e7f}};
  }
  void FillMask(std::vector<uint32_t>& mask) {
    mask.resize(static_cast<size_t>(vocab_ + 31) / 32);
    const bool all = OneIn(8);
    for (uint32_t& word : mask) word = all ? 0 : OneIn(2) ? ~0u : static_cast<uint32_t>(random_());
  }

  const int64_t vocab_;
  std::mt19937& random_;
};

struct Batch {
  int64_t vocab = 0;
  std::vector<float> logits;  // [rows, vocab]
  std::vector<std::unique_ptr<Question>> questions;

  int64_t rows() const { return std::ssize(questions); }
  // Rows [begin, begin + count) of columns [first, first + tokens), dense.
  std::vector<float> Part(int64_t begin, int64_t count, int64_t first, int64_t tokens) const {
    std::vector<float> part;
    for (int64_t i = begin; i < begin + count; ++i) {
      const float* row = logits.data() + i * vocab + first;
      part.insert(part.end(), row, row + tokens);
    }
    return part;
  }
  std::vector<SampleRow> Rows(int64_t begin, int64_t count) const {
    std::vector<SampleRow> rows;
    for (int64_t i = begin; i < begin + count; ++i) rows.push_back(questions[i]->row);
    return rows;
  }
};

inline Batch RandomBatch(int64_t rows, int64_t vocab, Shape shape, std::mt19937& random) {
  Batch batch;
  batch.vocab = vocab;
  Questioner questioner(vocab, random);
  for (int64_t i = 0; i < rows; ++i) {
    const std::vector<float> row = RandomLogits(shape, vocab, random);
    batch.logits.insert(batch.logits.end(), row.begin(), row.end());
    batch.questions.push_back(questioner.Next());
  }
  return batch;
}

// Rows [begin, begin + count) of the batch, by anything that has Sample.
template <typename Sampler>
std::vector<SampleResult> SampleRows(Sampler& sampler, const Batch& batch, int64_t begin,
                                     int64_t count) {
  std::vector<float> logits = batch.Part(begin, count, 0, batch.vocab);
  std::vector<SampleResult> results(count);
  sampler.Sample(DenseTensor(logits.data(), DType::kF32, count, batch.vocab),
                 batch.Rows(begin, count), results);
  return results;
}

// Log probabilities within `error`(expected).
template <typename Error>
void ExpectSameSample(const SampleResult& got, const SampleResult& expected, Error error) {
  const auto expect_logprob = [&](float is, float should) {
    if (std::isinf(should)) {
      EXPECT_EQ(is, should);
    } else {
      EXPECT_NEAR(is, should, error(should));
    }
  };
  EXPECT_EQ(got.token, expected.token);
  expect_logprob(got.logprob, expected.logprob);
  expect_logprob(got.target_logprob, expected.target_logprob);
  ASSERT_EQ(got.num_top, expected.num_top);
  for (int32_t i = 0; i < got.num_top; ++i) {
    EXPECT_EQ(got.top[i].token, expected.top[i].token) << i;
    expect_logprob(got.top[i].logprob, expected.top[i].logprob);
  }
}

inline bool SameBits(const SampleResult& a, const SampleResult& b) {
  return a.token == b.token && a.num_top == b.num_top &&
         std::memcmp(&a.logprob, &b.logprob, sizeof(float)) == 0 &&
         std::memcmp(&a.target_logprob, &b.target_logprob, sizeof(float)) == 0 &&
         std::memcmp(a.top.data(), b.top.data(), a.num_top * sizeof(TokenLogprob)) == 0;
}

}  // namespace treadle
