#include "engine/remote/plan_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <random>

#include "engine/remote/control.pb.h"
#include "tests/engine/plan_builder.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

// Values of every size, the extremes among them.
class RandomValues {
 public:
  explicit RandomValues(uint32_t seed) : random_(seed) {}

  uint64_t Bits() { return random_() >> (random_() % 64); }
  int32_t Int() {
    switch (random_() % 8) {
      case 0:
        return -1;
      case 1:
        return std::numeric_limits<int32_t>::min();
      case 2:
        return std::numeric_limits<int32_t>::max();
      default:
        return static_cast<int32_t>(Bits() & 0xffff);
    }
  }
  float Float() {
    const float special[] = {0.0f, -0.0f, 1.0f, INFINITY, -INFINITY, 1e-40f, 0.7f};
    return random_() % 2 == 0 ? special[random_() % std::size(special)]
                              : static_cast<float>(Int()) / 7.0f;
  }
  size_t Size(size_t largest) { return random_() % (largest + 1); }
  bool Flip() { return random_() % 2 == 0; }
  std::vector<int32_t> Ints(size_t largest) {
    std::vector<int32_t> values(Size(largest));
    for (int32_t& value : values) value = Int();
    return values;
  }
  std::mt19937_64& generator() { return random_; }

 private:
  std::mt19937_64 random_;
};

SequenceStart RandomStart(RandomValues& random) {
  SequenceStart start;
  start.sequence = random.Bits();
  start.prompt_length = random.Int();
  start.first_position = random.Int();
  start.pages = {random.Ints(5), random.Ints(5)};
  start.sampling.temperature = random.Float();
  start.sampling.top_k = random.Int();
  start.sampling.top_p = random.Float();
  start.sampling.min_p = random.Float();
  start.sampling.repetition_penalty = random.Float();
  start.sampling.presence_penalty = random.Float();
  start.sampling.frequency_penalty = random.Float();
  for (size_t i = random.Size(3); i > 0; --i) {
    start.sampling.logit_bias.push_back({random.Int(), random.Float()});
  }
  start.sampling.seed = random.Bits();
  start.min_new_tokens = random.Int();
  start.end_tokens = random.Ints(3);
  start.candidate = static_cast<uint32_t>(random.Bits());
  start.earlier_tokens = random.Ints(5);
  return start;
}

// Steps that mean nothing too: the message must carry what it is given.
Step RandomStep(RandomValues& random) {
  Step step;
  step.sequence = random.Bits();
  step.first_position = random.Int();
  step.tokens = random.Ints(4);
  step.num_tokens = random.Flip() ? static_cast<int32_t>(step.tokens.size()) : random.Int();
  step.sample = random.Flip();
  step.top_logprobs = random.Int();
  step.prompt_logprobs = random.Int();
  step.next_token = random.Int();
  step.pooling = kPoolings[random.Size(std::size(kPoolings) - 1)].value;
  step.masked = random.Flip();
  return step;
}

IterationPlan RandomPlan(RandomValues& random) {
  IterationPlan plan;
  plan.epoch = random.Bits();
  plan.iteration = random.Bits();
  for (size_t i = random.Size(4); i > 0; --i) plan.releases.push_back(random.Bits());
  for (size_t i = random.Size(3); i > 0; --i) {
    plan.page_copies.whole.push_back({random.Int(), random.Int()});
    plan.page_copies.window.push_back({random.Int(), random.Int()});
  }
  for (size_t i = random.Size(2); i > 0; --i) plan.starts.push_back(RandomStart(random));
  for (size_t i = random.Size(6); i > 0; --i) plan.steps.push_back(RandomStep(random));
  return plan;
}

TokenDetail RandomDetail(RandomValues& random) {
  TokenDetail detail{random.Float(), {}};
  for (size_t i = random.Size(3); i > 0; --i) {
    detail.top.push_back({random.Int(), random.Float()});
  }
  return detail;
}

IterationResult RandomResult(RandomValues& random) {
  IterationResult result;
  result.epoch = random.Bits();
  result.iteration = random.Bits();
  const bool details = random.Flip();
  const bool prompt_details = random.Flip();
  const bool embeddings = random.Flip();
  for (size_t i = random.Size(6); i > 0; --i) {
    StepResult step;
    step.sequence = random.Bits();
    step.token = random.Int();
    if (details) step.detail = RandomDetail(random);
    for (size_t k = prompt_details ? random.Size(3) : 0; k > 0; --k) {
      step.prompt_detail.push_back(RandomDetail(random));
    }
    for (size_t k = embeddings ? random.Size(3) : 0; k > 0; --k) {
      step.embedding.push_back(random.Float());
    }
    result.steps.push_back(std::move(step));
  }
  result.timings = {1e-9, 0, 0.25, 3.000000001, 1e-4};
  if (random.Flip()) result.experts = {48, 12288, 5280, 9};
  return result;
}

bool SameBits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

void ExpectEqual(const SequenceStart& a, const SequenceStart& b) {
  EXPECT_EQ(a.sequence, b.sequence);
  EXPECT_EQ(a.prompt_length, b.prompt_length);
  EXPECT_EQ(a.first_position, b.first_position);
  EXPECT_EQ(a.pages, b.pages);
  EXPECT_EQ(a.min_new_tokens, b.min_new_tokens);
  EXPECT_EQ(a.end_tokens, b.end_tokens);
  EXPECT_EQ(a.candidate, b.candidate);
  EXPECT_EQ(a.earlier_tokens, b.earlier_tokens);
  const SamplingParameters& x = a.sampling;
  const SamplingParameters& y = b.sampling;
  EXPECT_TRUE(SameBits(x.temperature, y.temperature));
  EXPECT_EQ(x.top_k, y.top_k);
  EXPECT_TRUE(SameBits(x.top_p, y.top_p));
  EXPECT_TRUE(SameBits(x.min_p, y.min_p));
  EXPECT_TRUE(SameBits(x.repetition_penalty, y.repetition_penalty));
  EXPECT_TRUE(SameBits(x.presence_penalty, y.presence_penalty));
  EXPECT_TRUE(SameBits(x.frequency_penalty, y.frequency_penalty));
  EXPECT_EQ(x.seed, y.seed);
  ASSERT_EQ(x.logit_bias.size(), y.logit_bias.size());
  for (size_t i = 0; i < x.logit_bias.size(); ++i) {
    EXPECT_EQ(x.logit_bias[i].token, y.logit_bias[i].token);
    EXPECT_TRUE(SameBits(x.logit_bias[i].bias, y.logit_bias[i].bias));
  }
}

void ExpectEqual(const IterationPlan& a, const IterationPlan& b) {
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.iteration, b.iteration);
  EXPECT_EQ(a.releases, b.releases);
  for (const PageKind kind : kPageKinds) {
    const auto &x = a.page_copies[kind], &y = b.page_copies[kind];
    ASSERT_EQ(x.size(), y.size());
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(x[i].from, y[i].from);
      EXPECT_EQ(x[i].to, y[i].to);
    }
  }
  ASSERT_EQ(a.starts.size(), b.starts.size());
  for (size_t i = 0; i < a.starts.size(); ++i) ExpectEqual(a.starts[i], b.starts[i]);
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (size_t i = 0; i < a.steps.size(); ++i) {
    const Step& x = a.steps[i];
    const Step& y = b.steps[i];
    EXPECT_EQ(x.sequence, y.sequence);
    EXPECT_EQ(x.first_position, y.first_position);
    EXPECT_EQ(x.tokens, y.tokens);
    EXPECT_EQ(x.num_tokens, y.num_tokens);
    EXPECT_EQ(x.sample, y.sample);
    EXPECT_EQ(x.top_logprobs, y.top_logprobs);
    EXPECT_EQ(x.prompt_logprobs, y.prompt_logprobs);
    EXPECT_EQ(x.next_token, y.next_token);
    EXPECT_EQ(x.pooling, y.pooling);
    EXPECT_EQ(x.masked, y.masked);
  }
}

void ExpectEqual(const TokenDetail& a, const TokenDetail& b) {
  EXPECT_TRUE(SameBits(a.logprob, b.logprob));
  ASSERT_EQ(a.top.size(), b.top.size());
  for (size_t i = 0; i < a.top.size(); ++i) {
    EXPECT_EQ(a.top[i].token, b.top[i].token);
    EXPECT_TRUE(SameBits(a.top[i].logprob, b.top[i].logprob));
  }
}

void ExpectEqual(const IterationResult& a, const IterationResult& b) {
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.iteration, b.iteration);
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (size_t i = 0; i < a.steps.size(); ++i) {
    EXPECT_EQ(a.steps[i].sequence, b.steps[i].sequence);
    EXPECT_EQ(a.steps[i].token, b.steps[i].token);
    ExpectEqual(a.steps[i].detail, b.steps[i].detail);
    ASSERT_EQ(a.steps[i].prompt_detail.size(), b.steps[i].prompt_detail.size());
    for (size_t k = 0; k < a.steps[i].prompt_detail.size(); ++k) {
      ExpectEqual(a.steps[i].prompt_detail[k], b.steps[i].prompt_detail[k]);
    }
  }
  EXPECT_NEAR(a.timings.queue, b.timings.queue, 0.51e-9);
  EXPECT_NEAR(a.timings.receive, b.timings.receive, 0.51e-9);
  EXPECT_NEAR(a.timings.compute, b.timings.compute, 0.51e-9);
  EXPECT_NEAR(a.timings.sample, b.timings.sample, 0.51e-9);
  EXPECT_NEAR(a.timings.gap, b.timings.gap, 0.51e-9);
  EXPECT_EQ(a.experts, b.experts);
}

std::string PlanBytes(const IterationPlan& plan) {
  control::PlanMessage message;
  EncodePlan(plan, message);
  return message.SerializeAsString();
}
std::string ResultBytes(const IterationResult& result) {
  control::ResultMessage message;
  EncodeResult(result, message);
  return message.SerializeAsString();
}
// Nothing for bytes that are no message at all.
std::optional<absl::StatusOr<IterationPlan>> PlanFrom(const std::string& bytes) {
  control::PlanMessage message;
  if (!message.ParseFromString(bytes)) return std::nullopt;
  return DecodePlan(message);
}
std::optional<absl::StatusOr<IterationResult>> ResultFrom(const std::string& bytes) {
  control::ResultMessage message;
  if (!message.ParseFromString(bytes)) return std::nullopt;
  return DecodeResult(message);
}

TEST(PlanMessages, EveryFieldOfAPlanSurvives) {
  RandomValues random(1);
  for (int i = 0; i < 2000 && !testing::Test::HasFailure(); ++i) {
    const IterationPlan plan = RandomPlan(random);
    const auto back = PlanFrom(PlanBytes(plan));
    ASSERT_TRUE(back && back->ok()) << back->status();
    ExpectEqual(plan, **back);
  }
}

TEST(PlanMessages, EveryFieldOfAResultSurvives) {
  RandomValues random(2);
  for (int i = 0; i < 2000 && !testing::Test::HasFailure(); ++i) {
    const IterationResult result = RandomResult(random);
    const auto back = ResultFrom(ResultBytes(result));
    ASSERT_TRUE(back && back->ok()) << back->status();
    ExpectEqual(result, **back);
  }
}

TEST(PlanMessages, MasksSurvive) {
  control::MaskMessage message;
  const std::vector<StepMask> masks = {{3, {0x80000001u, 0xfedcba98u}}, {9, {0u, ~0u}}};
  EncodeMasks(5, 7, masks, message);
  control::MaskMessage read;
  ASSERT_TRUE(read.ParseFromString(message.SerializeAsString()));
  EXPECT_EQ(read.epoch(), 5u);
  EXPECT_EQ(read.iteration(), 7u);
  const auto back = DecodeMasks(read);
  ASSERT_TRUE(back.ok());
  ASSERT_EQ(back->size(), 2u);
  for (size_t i = 0; i < masks.size(); ++i) {
    EXPECT_EQ((*back)[i].step, masks[i].step);
    EXPECT_EQ((*back)[i].allowed, masks[i].allowed);
  }
}

// Late in a long service: large ids and iterations, positions and tokens of a 128K model.
TEST(PlanMessages, APlainDecodingStepCostsAtMostTenBytes) {
  const auto plan_of = [](int steps) {
    PlanOf plan(/*epoch=*/3, /*iteration=*/50'000'000);
    for (int i = 0; i < steps; ++i) {
      plan.Step(SampleOf(StepOf(5'000'000 + 7 * i, 100'000 + i, {120'000 + i})));
    }
    return IterationPlan(plan);
  };
  const size_t eight = PlanBytes(plan_of(8)).size();
  EXPECT_LE(PlanBytes(plan_of(9)).size() - eight, 10u);
  // With the envelope: message tag and length, gRPC's prefix, HTTP/2's frame header.
  constexpr size_t kEnvelope = 3 + 5 + 9;
  EXPECT_LE((eight + kEnvelope) / 8.0, 16.0);
  IterationResult result;
  result.epoch = 3;
  result.iteration = 50'000'000;
  for (int i = 0; i < 8; ++i) {
    StepResult step;
    step.sequence = 5'000'000 + 7 * i;
    step.token = 120'000 + i;
    result.steps.push_back(step);
  }
  result.timings = {1e-4, 1e-3, 2e-2, 1e-3, 1e-3};
  const size_t answer = ResultBytes(result).size();
  EXPECT_LE((answer + kEnvelope) / 8.0, 16.0);
  RecordProperty("plan_bytes_batch_8", static_cast<int>(eight));
  RecordProperty("result_bytes_batch_8", static_cast<int>(answer));
}

std::string Damage(std::string bytes, std::mt19937_64& random) {
  if (bytes.empty()) return bytes;
  if (random() % 4 == 0) bytes.resize(random() % bytes.size());
  for (uint64_t flips = random() % 4; flips > 0 && !bytes.empty(); --flips) {
    bytes[random() % bytes.size()] ^= static_cast<char>(1 << (random() % 8));
  }
  return bytes;
}

// No crash, no endless memory, and an error says which message is wrong.
TEST(PlanMessages, DamagedMessagesAreErrorsOrOtherMessages) {
  RandomValues random(3);
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    if (const auto plan = PlanFrom(Damage(PlanBytes(RandomPlan(random)), random.generator()))) {
      refused += !plan->ok();
      if (!plan->ok()) {
        EXPECT_THAT(plan->status().message(), HasSubstr("plan: "));
      }
    }
    const auto bytes = Damage(ResultBytes(RandomResult(random)), random.generator());
    if (const auto result = ResultFrom(bytes)) {
      refused += !result->ok();
      if (!result->ok()) {
        EXPECT_THAT(result->status().message(), HasSubstr("result: "));
      }
    }
  }
  EXPECT_GT(refused, 500);
}

TEST(PlanMessages, ErrorsNameTheField) {
  control::PlanMessage plan;
  EncodePlan(PlanOf().Step(StepOf(1, 0, {4, 5})), plan);
  const auto message = [&](const std::function<void(control::PlanMessage&)>& change) {
    control::PlanMessage changed = plan;
    change(changed);
    return std::string(DecodePlan(changed).status().message());
  };
  EXPECT_EQ(message([](auto& m) { m.clear_position(); }),
            "plan: position has 0 entries, expected 1");
  EXPECT_EQ(message([](auto& m) { m.add_kind(0); }), "plan: kind has 2 entries, expected 1");
  EXPECT_EQ(message([](auto& m) { m.set_kind(0, 4096); }), "plan: kind is 4096 for step 0");
  EXPECT_EQ(message([](auto& m) { m.set_extra(0, 1 << 30); }),
            "plan: step 0 announces 1073741824 tokens of 2");
  EXPECT_EQ(message([](auto& m) { m.set_extra(0, -3); }), "plan: step 0 announces -3 tokens of 2");
  EXPECT_EQ(message([](auto& m) { m.clear_extra(); }),
            "plan: extra ends before step 0 has what it announces");
  EXPECT_EQ(message([](auto& m) { m.add_token(3); }), "plan: token has 3 entries, expected 2");
  EXPECT_EQ(message([](auto& m) { m.add_copy(3); }), "plan: copy has 1 entries, expected 2");
  EXPECT_EQ(message([](auto& m) { m.add_start()->add_bias(1); }),
            "plan: start: bias has 1 entries, expected 0");
}

}  // namespace
}  // namespace treadle
