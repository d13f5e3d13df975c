// The default model's logits, teacher-forced over 2,048 positions of English, against transformers
// on the file's dequantized weights (tests/oracles/make_logit_oracles.py). Needs the file; `make
// test` fetches it. The tolerance is model_test.cc's: 8 times transformers' own fp32 rounding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/op_cases/instrumented.h"
#include "tests/models/teacher_forcing.h"
#include "tests/support/default_model.h"

namespace treadle {
namespace {

constexpr double kToleranceFactor = 8;
constexpr int64_t kChunk = 128;

constexpr size_t kPositions = kInstrumented ? 96 : 1 << 20;  // of each sequence, at most
constexpr int64_t kLeastPositions = kInstrumented ? 192 : 2000;

struct OracleRow {
  float log_sum = 0;  // log of the sum of exponentials of the logits
  std::vector<uint16_t> top_ids;
  std::vector<float> top;     // descending
  std::vector<float> probes;  // logits of Oracle::probes
};
struct Oracle {
  double tolerance = 0;
  std::vector<uint16_t> probes;
  struct Sequence {
    std::vector<int32_t> token_ids;
    std::vector<OracleRow> rows;
  };
  std::vector<Sequence> sequences;
};

class Bytes {
 public:
  explicit Bytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
  }
  template <typename T>
  std::vector<T> Take(size_t count) {
    std::vector<T> values(count);
    const size_t size = count * sizeof(T);
    EXPECT_LE(at_ + size, bytes_.size());
    if (at_ + size <= bytes_.size()) std::memcpy(values.data(), bytes_.data() + at_, size);
    at_ += size;
    return values;
  }
  bool AtEnd() const { return at_ == bytes_.size(); }

 private:
  std::vector<char> bytes_;
  size_t at_ = 0;
};

Oracle ReadOracle() {
  Bytes bytes(TREADLE_TESTDATA "/models/default-model.bin");
  Oracle oracle;
  oracle.sequences.resize(bytes.Take<uint32_t>(1)[0]);
  const auto lengths = bytes.Take<uint32_t>(oracle.sequences.size());
  const uint32_t top = bytes.Take<uint32_t>(1)[0];
  const uint32_t probes = bytes.Take<uint32_t>(1)[0];
  oracle.tolerance = kToleranceFactor * bytes.Take<float>(1)[0];
  oracle.probes = bytes.Take<uint16_t>(probes);
  for (size_t i = 0; i < lengths.size(); ++i) {
    Oracle::Sequence& sequence = oracle.sequences[i];
    const auto ids = bytes.Take<uint16_t>(lengths[i]);
    sequence.token_ids.assign(ids.begin(), ids.end());
    for (uint32_t position = 0; position < lengths[i]; ++position) {
      OracleRow& row = sequence.rows.emplace_back();
      row.log_sum = bytes.Take<float>(1)[0];
      row.top_ids = bytes.Take<uint16_t>(top);
      row.top = bytes.Take<float>(top);
      row.probes = bytes.Take<float>(probes);
    }
  }
  EXPECT_TRUE(bytes.AtEnd());
  for (Oracle::Sequence& sequence : oracle.sequences) {
    if (sequence.rows.size() <= kPositions) continue;
    sequence.token_ids.resize(kPositions);
    sequence.rows.resize(kPositions);
  }
  return oracle;
}

double LogSum(std::span<const float> logits) {
  const double peak = *std::ranges::max_element(logits);
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - peak);
  return peak + std::log(sum);
}

// Kullback-Leibler divergence of softmax(q) from softmax(p), in nats.
double Divergence(std::span<const float> p, std::span<const float> q) {
  const double p_sum = LogSum(p), q_sum = LogSum(q);
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double log_p = p[i] - p_sum;
    sum += std::exp(log_p) * (log_p - (q[i] - q_sum));
  }
  return sum;
}

class DefaultModelLogits : public ::testing::Test {
 protected:
  void SetUp() override {
    NEEDS_DEFAULT_MODEL(path);
    auto checkpoint = Checkpoint::Open(path);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    checkpoint_ = *std::move(checkpoint);
  }

  std::unique_ptr<TeacherForcing> Load(ComputeMode compute, int64_t max_tokens) {
    CpuBackendOptions options;
    options.compute = compute;
    auto backend = CreateCpuBackend(options);
    EXPECT_TRUE(backend.ok()) << backend.status();
    if (!backend.ok()) return nullptr;
    auto model = TeacherForcing::Create(*checkpoint_, *std::move(backend),
                                        {.max_tokens = max_tokens, .chunk = kChunk});
    EXPECT_TRUE(model.ok()) << model.status();
    return model.ok() ? *std::move(model) : nullptr;
  }

  std::unique_ptr<Checkpoint> checkpoint_;
};

TEST_F(DefaultModelLogits, ExactModeAgreesWithTransformers) {
  const Oracle oracle = ReadOracle();
  ASSERT_FALSE(HasFailure());
  const auto model = Load(ComputeMode::kExact, 1024);
  ASSERT_NE(model, nullptr);
  int64_t positions = 0, decided = 0;
  double largest = 0;
  for (const Oracle::Sequence& sequence : oracle.sequences) {
    model->Run(sequence.token_ids, [&](int64_t position, std::span<const float> logits) {
      const OracleRow& wanted = sequence.rows[position];
      const auto compare = [&](double found, double expected) {
        ASSERT_TRUE(std::isfinite(found));
        largest = std::max(largest, std::abs(found - expected));
      };
      for (size_t i = 0; i < wanted.top.size(); ++i) {
        compare(logits[wanted.top_ids[i]], wanted.top[i]);
      }
      for (size_t i = 0; i < wanted.probes.size(); ++i) {
        compare(logits[oracle.probes[i]], wanted.probes[i]);
      }
      compare(LogSum(logits), wanted.log_sum);
      ++positions;
      if (wanted.top[0] - wanted.top[1] <= 2 * oracle.tolerance) return;
      ++decided;
      EXPECT_EQ(ArgMax(logits), wanted.top_ids[0]) << "position " << position;
    });
  }
  EXPECT_LE(largest, oracle.tolerance);
  EXPECT_GE(positions, kLeastPositions);
  EXPECT_GE(decided, positions * 9 / 10);
  RecordProperty("largest_difference", std::to_string(largest));
}

// The ground of `auto`: activations of 12 bits cost less than 5e-5 of mean KL divergence from
// exact, those of 8 bits less than 5e-3; and more than nothing (else this compares a mode with
// itself).
TEST_F(DefaultModelLogits, IntegerModesStayCloseToExact) {
  struct Bound {
    ComputeMode compute;
    double low, high;
    double sum = 0;
    std::unique_ptr<TeacherForcing> runner = {};
  };
  // The mean over a few positions, early ones at that, is a rougher figure, and a larger one for
  // kInt12: 1.0e-4 here, 6.0e-5 on a text.
  constexpr double kInt8Bound = kInstrumented ? 1e-2 : 5e-3;
  Bound bounds[] = {{ComputeMode::kInt16, 1e-9, 1e-5},
                    {ComputeMode::kInt12, 1e-7, 2e-4},
                    {ComputeMode::kInt8, 1e-4, kInt8Bound}};
  constexpr int64_t kTokens = 512;
  const Oracle oracle = ReadOracle();
  ASSERT_FALSE(HasFailure());
  const auto exact = Load(ComputeMode::kExact, kTokens);
  ASSERT_TRUE(exact != nullptr);
  for (Bound& bound : bounds) {
    bound.runner = Load(bound.compute, kTokens);
    ASSERT_TRUE(bound.runner != nullptr);
  }
  const auto vocab = static_cast<size_t>(checkpoint_->config().vocab);
  int64_t positions = 0;
  for (const Oracle::Sequence& sequence : oracle.sequences) {
    if (static_cast<int64_t>(sequence.token_ids.size()) > kTokens) continue;
    const std::vector<float> one = exact->Logits(sequence.token_ids);
    for (Bound& bound : bounds) {
      bound.runner->Run(sequence.token_ids, [&](int64_t position, std::span<const float> q) {
        const size_t first = static_cast<size_t>(position) * vocab;
        bound.sum += Divergence(std::span(one).subspan(first, vocab), q);
      });
    }
    positions += static_cast<int64_t>(sequence.token_ids.size());
  }
  ASSERT_GE(positions, std::min(kLeastPositions, 2 * kTokens));
  for (const Bound& bound : bounds) {
    const double mean = bound.sum / static_cast<double>(positions);
    EXPECT_LT(mean, bound.high) << Name(bound.compute);
    EXPECT_GT(mean, bound.low) << Name(bound.compute);
  }
}

}  // namespace
}  // namespace treadle
