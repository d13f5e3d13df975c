// Sample and SampleShard: rows of logits with requests of every kind.
#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>

#include "kernels/op_cases/op_cases.h"
#include "kernels/op_cases/random.h"

namespace treadle {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Everything that one SampleRow points to.
struct Wishes {
  SamplingParameters parameters;
  std::vector<TokenCount> counts;
  std::vector<int32_t> suppressed;
  std::vector<uint32_t> mask;
  SampleRow row;
};

// A shard has tokens on both sides of it.
constexpr int32_t kBefore = 37;
constexpr int32_t kBehind = 21;

constexpr std::pair<std::string_view, OpCase::Sampling> kKinds[] = {
    {"greedy", OpCase::Sampling::kGreedy},       {"plain", OpCase::Sampling::kPlain},
    {"top_k", OpCase::Sampling::kTopK},          {"top_p_min_p", OpCase::Sampling::kTopPMinP},
    {"penalties", OpCase::Sampling::kPenalties}, {"logprobs", OpCase::Sampling::kLogprobs},
    {"mixed", OpCase::Sampling::kMixed},
};

void AddSamples(std::vector<OpCase>& cases) {
  for (const auto& [name, sampling] : kKinds) {
    const auto add = [&](int64_t vocab, int64_t rows, bool bench) {
      cases.push_back({.name = Str("sample/", name, "/", vocab, "/rows=", rows),
                       .op = Op::kSample,
                       .rows = rows,
                       .cols = vocab,
                       .sampling = sampling,
                       .bench = bench,
                       .slow = bench});
    };
    for (auto [vocab, rows] : {std::pair<int64_t, int64_t>{49152, 3}, {1003, 24}, {5, 9}, {1, 2}}) {
      add(vocab, rows, false);
    }
    add(49152, 32, true);
  }
}

void AddSampleShards(std::vector<OpCase>& cases) {
  for (const auto& [name, sampling] : kKinds) {
    // A third of that vocabulary.
    for (auto [tokens, rows] : {std::pair<int64_t, int64_t>{16384, 32}, {1003, 24}, {5, 9}}) {
      cases.push_back({.name = Str("sample_shard/", name, "/", tokens, "/rows=", rows),
                       .op = Op::kSampleShard,
                       .rows = rows,
                       .cols = tokens,
                       .sampling = sampling,
                       .bench = tokens == 16384,
                       .slow = tokens == 16384});
    }
  }
}

// Every third row has ties, a mixed batch also NaN and infinities.
void FillLogits(const OpCase& c, int64_t row, Random& random, float* x) {
  for (int64_t i = 0; i < c.cols; ++i) {
    x[i] = 2 * random.Normal() + (random.Below(c.cols) < 8 ? 8.0f : 0.0f);
    if (row % 3 == 2) x[i] = std::round(x[i] * 4) / 4;
  }
  if (c.sampling != OpCase::Sampling::kMixed) return;
  const auto put = [&](float value) { x[random.Below(c.cols)] = value; };
  if (row % 4 == 1) put(-kInfinity);
  if (row % 4 == 2) put(std::numeric_limits<float>::quiet_NaN());
  if (row == 7) std::fill_n(x, c.cols, -kInfinity);
  if (row == 8) std::fill_n(x, c.cols, std::numeric_limits<float>::quiet_NaN());
  if (row == 9) put(kInfinity);
}

void DrawPenalties(int64_t vocab, Random& random, Wishes& wishes) {
  SamplingParameters& parameters = wishes.parameters;
  parameters.repetition_penalty = static_cast<float>(random.Uniform(0.8, 1.4));
  parameters.presence_penalty = static_cast<float>(random.Uniform(-1, 1));
  parameters.frequency_penalty = static_cast<float>(random.Uniform(-0.5, 0.5));
  for (int64_t token = random.Below(3); token < vocab; token += 1 + random.Below(9)) {
    const auto id = static_cast<int32_t>(token);
    const auto in_output = static_cast<int32_t>(random.Below(3));
    wishes.counts.push_back(
        {id, in_output == 0 ? 1 : static_cast<int32_t>(random.Below(2)), in_output});
    if (random.Below(8) == 0) {
      parameters.logit_bias.push_back({id, static_cast<float>(random.Uniform(-5, 5))});
    }
    if (random.Below(8) == 0) wishes.suppressed.push_back(id);
  }
  wishes.mask.resize(static_cast<size_t>(vocab + 31) / 32);
  for (uint32_t& word : wishes.mask) word = static_cast<uint32_t>(random.Below(int64_t{1} << 32));
}

void MakeWishes(OpCase::Sampling kind, bool shard, int64_t vocab, int64_t row, Random& random,
                Wishes& wishes) {
  using Sampling = OpCase::Sampling;
  SamplingParameters& parameters = wishes.parameters;
  parameters.temperature =
      kind == Sampling::kGreedy ? 0.0f : static_cast<float>(random.Uniform(0.3, 1.5));
  parameters.seed = SeedOf("sample", static_cast<uint64_t>(row));
  constexpr int32_t kTopK[] = {1, 2, 7, 40, 1000, 1 << 20};
  if (kind == Sampling::kTopK) parameters.top_k = kTopK[row % std::size(kTopK)];
  if (kind == Sampling::kTopPMinP) {
    parameters.top_p = static_cast<float>(random.Uniform(0.05, 1));
    parameters.min_p = row % 2 == 0 ? 0.0f : static_cast<float>(random.Uniform(0, 0.2));
    parameters.top_k = row % 3 == 0 ? 50 : 0;
  }
  if (kind == Sampling::kPenalties) DrawPenalties(vocab, random, wishes);
  if (shard && kind == Sampling::kPenalties) parameters.top_k = 20;  // has candidates
  wishes.row = {.parameters = &wishes.parameters,
                .counts = wishes.counts,
                .suppressed = wishes.suppressed,
                .mask = wishes.mask.empty() ? nullptr : wishes.mask.data(),
                .candidate = static_cast<uint32_t>(row % 3),
                .position = 5 * row + 1};
  if (kind == Sampling::kLogprobs) {
    constexpr int32_t kTop[] = {0, 1, 5, kMaxTopLogprobs};
    wishes.row.top_logprobs = kTop[row % std::size(kTop)];
    if (row % 2 == 1) wishes.row.target = static_cast<int32_t>(random.Below(vocab));
    if (row % 5 == 4) wishes.row.parameters = nullptr;  // prompt log probabilities
  }
}

// Prepares both ops. Token ids are of the whole vocabulary.
void PrepareSample(OpRun& run, uint64_t seed) {
  const OpCase& c = run.op_case();
  const bool shard = c.op == Op::kSampleShard;
  const int64_t vocab = c.cols + (shard ? kBefore + kBehind : 0);
  GuardedTensor& logits = run.Add("logits", Role::kLost, c.rows, c.cols);
  const auto wishes = std::make_shared<std::deque<Wishes>>();
  std::vector<SampleRow> rows;
  Random random(seed);
  for (int64_t row = 0; row < c.rows; ++row) {
    FillLogits(c, row, random, logits.Row(row));
    const bool mixed = c.sampling == OpCase::Sampling::kMixed;
    MakeWishes(mixed ? static_cast<OpCase::Sampling>(row % 6) : c.sampling, shard, vocab, row,
               random, wishes->emplace_back());
    rows.push_back(wishes->back().row);
  }
  if (shard) {
    run.shards.resize(rows.size());
  } else {
    run.samples.resize(rows.size());
  }
  run.call = [&run, &logits, shard, wishes, rows](int64_t begin, int64_t count) {
    const Tensor part = logits.Rows(begin, count);
    const auto wanted = std::span(rows).subspan(begin, count);
    if (shard) {
      run.backend().SampleShard(part, kBefore, wanted, std::span(run.shards).subspan(begin, count));
    } else {
      run.backend().Sample(part, wanted, std::span(run.samples).subspan(begin, count));
    }
  };
  run.bytes_moved = logits.bytes();
  run.operations_done = 2.0 * static_cast<double>(c.rows * c.cols);
}

}  // namespace

extern const OpRow kSampleRow = {"sample", AddSamples, PrepareSample};
extern const OpRow kSampleShardRow = {"sample_shard", AddSampleShards, PrepareSample};

}  // namespace treadle
