#include "engine/plan/plan_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <variant>

#include "engine/plan/plan.pb.h"
#include "tests/engine/plan_builder.h"
#include "tests/support/assert_ok.h"

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
  start.pages = SequencePages({random.Ints(5), random.Ints(5)});
  for (const SamplingField& field : kSamplingFields) {
    if (const auto* real = std::get_if<float SamplingParameters::*>(&field.member)) {
      start.sampling.** real = random.Float();
    } else {
      start.sampling.*std::get<int32_t SamplingParameters::*>(field.member) = random.Int();
    }
  }
  for (size_t i = random.Size(3); i > 0; --i) {
    start.sampling.logit_bias.push_back({random.Int(), random.Float()});
  }
  start.sampling.seed = random.Bits();
  start.min_new_tokens = random.Int();
  start.end_tokens = random.Ints(3);
  start.candidate = static_cast<uint32_t>(random.Bits());
  start.earlier_tokens = random.Ints(5);
  start.adapter = random.Int();
  start.mean_pooling = random.Flip();
  return start;
}

// Steps that mean nothing too: the message must carry what it is given.
Step RandomStep(RandomValues& random) {
  Step step;
  step.sequence = random.Bits();
  step.first_position = random.Int();
  step.tokens = random.Ints(4);
  step.num_tokens = random.Flip() ? static_cast<int32_t>(step.tokens.size()) : random.Int();
  for (size_t i = random.Size(3); i > 0; --i) {
    step.outputs.push_back({.row = random.Int(),
                            .sample = random.Flip(),
                            .masked = random.Flip(),
                            .hidden = random.Flip(),
                            .top_logprobs = random.Int(),
                            .target = random.Int(),
                            .target_logprobs = random.Int()});
  }
  return step;
}

IterationPlan RandomPlan(RandomValues& random) {
  IterationPlan plan;
  plan.epoch = random.Bits();
  plan.iteration = random.Bits();
  for (size_t i = random.Size(4); i > 0; --i) plan.releases.push_back(random.Bits());
  for (size_t i = random.Size(3); i > 0; --i) {
    plan.page_copies[PageKind::kWhole].push_back({random.Int(), random.Int()});
    plan.page_copies[PageKind::kWindow].push_back({random.Int(), random.Int()});
  }
  for (size_t i = random.Size(2); i > 0; --i) plan.starts.push_back(RandomStart(random));
  for (size_t i = random.Size(6); i > 0; --i) plan.steps.push_back(RandomStep(random));
  plan.replicas = random.Ints(3);
  if (random.Flip()) plan.stages = {3, 3 + static_cast<int32_t>(random.Size(4))};
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
  for (size_t i = random.Size(6); i > 0; --i) {
    StepResult& step = result.steps.emplace_back();
    step.sequence = random.Bits();
    for (size_t k = random.Size(3); k > 0; --k) {
      RowResult& row = step.outputs.emplace_back();
      row.token = random.Int();
      if (random.Flip()) row.detail = RandomDetail(random);
      if (random.Flip()) row.target = RandomDetail(random);
      for (size_t n = random.Size(3); n > 0; --n) row.hidden.push_back(random.Float());
    }
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
  EXPECT_EQ(a.adapter, b.adapter);
  EXPECT_EQ(a.mean_pooling, b.mean_pooling);
  const SamplingParameters& x = a.sampling;
  const SamplingParameters& y = b.sampling;
  for (const SamplingField& field : kSamplingFields) {
    std::visit(
        [&](auto member) {
          EXPECT_EQ(std::memcmp(&(x.*member), &(y.*member), sizeof(x.*member)), 0) << field.name;
        },
        field.member);
  }
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
  EXPECT_EQ(a.stages, b.stages);
  EXPECT_EQ(a.replicas, b.replicas);
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (size_t i = 0; i < a.steps.size(); ++i) {
    const Step& x = a.steps[i];
    const Step& y = b.steps[i];
    EXPECT_EQ(x.sequence, y.sequence);
    EXPECT_EQ(x.first_position, y.first_position);
    EXPECT_EQ(x.tokens, y.tokens);
    EXPECT_EQ(x.num_tokens, y.num_tokens);
    ASSERT_EQ(x.outputs.size(), y.outputs.size());
    for (size_t k = 0; k < x.outputs.size(); ++k) {
      EXPECT_EQ(x.outputs[k].row, y.outputs[k].row);
      EXPECT_EQ(x.outputs[k].sample, y.outputs[k].sample);
      EXPECT_EQ(x.outputs[k].masked, y.outputs[k].masked);
      EXPECT_EQ(x.outputs[k].hidden, y.outputs[k].hidden);
      EXPECT_EQ(x.outputs[k].top_logprobs, y.outputs[k].top_logprobs);
      EXPECT_EQ(x.outputs[k].target, y.outputs[k].target);
      EXPECT_EQ(x.outputs[k].target_logprobs, y.outputs[k].target_logprobs);
    }
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
    ASSERT_EQ(a.steps[i].outputs.size(), b.steps[i].outputs.size());
    for (size_t k = 0; k < a.steps[i].outputs.size(); ++k) {
      const RowResult &x = a.steps[i].outputs[k], &y = b.steps[i].outputs[k];
      EXPECT_EQ(x.token, y.token);
      ExpectEqual(x.detail, y.detail);
      ExpectEqual(x.target, y.target);
      ASSERT_EQ(x.hidden.size(), y.hidden.size());
      for (size_t n = 0; n < x.hidden.size(); ++n) {
        EXPECT_TRUE(SameBits(x.hidden[n], y.hidden[n]));
      }
    }
  }
  EXPECT_EQ(a.timings.queue, b.timings.queue);
  EXPECT_EQ(a.timings.receive, b.timings.receive);
  EXPECT_EQ(a.timings.compute, b.timings.compute);
  EXPECT_EQ(a.timings.sample, b.timings.sample);
  EXPECT_EQ(a.timings.gap, b.timings.gap);
  EXPECT_EQ(a.experts, b.experts);
}

std::string PlanBytes(const IterationPlan& plan) {
  proto::Plan message;
  EncodePlan(plan, message);
  return message.SerializeAsString();
}
std::string ResultBytes(const IterationResult& result) {
  proto::Result message;
  EncodeResult(result, message);
  return message.SerializeAsString();
}
// Nothing for bytes that are no message at all.
std::optional<absl::StatusOr<IterationPlan>> PlanFrom(const std::string& bytes) {
  proto::Plan message;
  if (!message.ParseFromString(bytes)) return std::nullopt;
  return DecodePlan(message);
}
std::optional<absl::StatusOr<IterationResult>> ResultFrom(const std::string& bytes) {
  proto::Result message;
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
  proto::Masks message;
  const std::vector<OutputMask> masks = {{3, 0, {0x80000001u, 0xfedcba98u}}, {9, 2, {0u, ~0u}}};
  EncodeMasks(5, 7, masks, message);
  proto::Masks read;
  ASSERT_TRUE(read.ParseFromString(message.SerializeAsString()));
  EXPECT_EQ(read.epoch(), 5u);
  EXPECT_EQ(read.iteration(), 7u);
  ASSERT_OK_AND_ASSIGN(const auto back, DecodeMasks(read));
  ASSERT_EQ(back.size(), 2u);
  for (size_t i = 0; i < masks.size(); ++i) {
    EXPECT_EQ(back[i].step, masks[i].step);
    EXPECT_EQ(back[i].output, masks[i].output);
    EXPECT_EQ(back[i].allowed, masks[i].allowed);
  }
}

// Late in a long service: large ids and iterations, positions and tokens of a 128K model.
TEST(PlanMessages, ADecodingStepIsSmall) {
  PlanOf plan(/*epoch=*/3, /*iteration=*/50'000'000);
  IterationResult result;
  result.epoch = 3;
  result.iteration = 50'000'000;
  result.timings = {1e-4, 1e-3, 2e-2, 1e-3, 1e-3};
  for (int i = 0; i < 32; ++i) {
    plan.Step(SampleOf(StepOf(5'000'000 + 7 * i, 100'000 + i, {120'000 + i})));
    result.steps.push_back({.sequence = 5'000'000u + 7u * i, .outputs = {{.token = 120'000 + i}}});
  }
  // Beside 2 KiB of activations and more.
  EXPECT_LE(PlanBytes(plan).size(), 32u * 24 + 16);
  EXPECT_LE(ResultBytes(result).size(), 32u * 16 + 64);
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
  EXPECT_GT(refused, 100);
}

TEST(PlanMessages, ErrorsNameTheField) {
  proto::Plan plan;
  EncodePlan(PlanOf().Step(StepOf(1, 0, {4, 5})), plan);
  const auto message = [&](const std::function<void(proto::Plan&)>& change) {
    proto::Plan changed = plan;
    change(changed);
    return std::string(DecodePlan(changed).status().message());
  };
  EXPECT_EQ(message([](auto& m) { m.add_page_copies()->add_from(3); }),
            "plan: to has 0 entries, expected 1");
  EXPECT_EQ(message([](auto& m) { m.add_starts()->mutable_sampling()->add_biases(1); }),
            "plan: biases has 1 entries, expected 0");
  EXPECT_EQ(message([](auto& m) {
              m.add_starts()->add_pages()->set_kind(static_cast<proto::PageKind>(7));
            }),
            "plan: kind of pages is 7, expected less than 2");
  EXPECT_EQ(message([](auto& m) { m.mutable_stages()->set_begin(2); }),
            "plan: stages 2 to before 0 run it");
}

}  // namespace
}  // namespace treadle
