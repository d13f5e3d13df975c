// Plans as a worker reads them, one after the other, into a table of sequences; and results as a
// master reads them. The first byte says which; messages follow, two bytes of length before each.
#include "engine/plan/plan_messages.h"

#include "base/status.h"
#include "engine/plan/sequence_table.h"
#include "engine/remote/control.pb.h"
#include "tests/engine/plan_builder.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace treadle {
namespace {

constexpr SequenceTable::Limits kLimits = {.page_size = 4,
                                           .num_pages = PageCounts(16, 16),
                                           .window = 5,
                                           .vocab = 50,
                                           .context = 40,
                                           .max_batch_tokens = 24};

std::string Framed(const google::protobuf::Message& message) {
  const std::string bytes = message.SerializeAsString();
  const auto size = static_cast<uint16_t>(bytes.size());
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + bytes;
}

// As Stage does it.
void Apply(const IterationPlan& plan, SequenceTable& table) {
  if (!table.Check(plan).ok()) return;
  TREADLE_CHECK(plan.num_tokens() <= kLimits.max_batch_tokens);
  for (const SequenceId sequence : plan.releases) table.Release(sequence);
  TREADLE_CHECK(table.Start(plan.starts).ok());
  TREADLE_CHECK(static_cast<int64_t>(table.size()) <= kLimits.num_pages[PageKind::kWhole]);
  for (const Step& step : plan.steps) {
    LiveSequence& sequence = table.At(step.sequence);
    const int32_t previous = sequence.previous_sample();
    sequence.Enter(step.first_position,
                   step.tokens.empty() ? std::span(&previous, 1) : std::span(step.tokens));
    TREADLE_CHECK(sequence.next_position() <= sequence.capacity());
    for (const int32_t id : sequence.ids()) TREADLE_CHECK(id >= -1 && id < kLimits.vocab);
    if (!step.outputs.empty() && step.outputs.back().sample) sequence.SetSample(1);
  }
}

template <typename Message>
bool Parse(FuzzInput& input, Message& message) {
  const std::string_view bytes = input.Bytes(input.Number<uint16_t>());
  return message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

// A decoded plan is encoded to what decodes to the same.
template <typename Message, typename Value>
void CheckEncoding(const Value& value, void (*encode)(const Value&, Message&),
                   absl::StatusOr<Value> (*decode)(const Message&)) {
  Message once, twice;
  encode(value, once);
  const auto decoded = decode(once);
  TREADLE_CHECK(decoded.ok());
  encode(*decoded, twice);
  TREADLE_CHECK(once.SerializeAsString() == twice.SerializeAsString());
}

void Run(std::string_view bytes) {
  FuzzInput input(bytes);
  const bool worker = input.Choose(2) == 0;
  SequenceTable table(kLimits);
  while (!input.empty()) {
    if (worker) {
      proto::Plan message;
      const auto plan = Parse(input, message) ? DecodePlan(message) : IterationPlan();
      if (!plan.ok()) continue;
      CheckEncoding(*plan, EncodePlan, DecodePlan);
      Apply(*plan, table);
    } else {
      proto::Result message;
      const auto result = Parse(input, message) ? DecodeResult(message) : IterationResult();
      if (result.ok()) CheckEncoding(*result, EncodeResult, DecodeResult);
    }
  }
}

std::vector<std::string> Seeds() {
  SequenceStart first = StartOf(7, 6, {3, 1, 2}, {0, 1, 0}), second = StartOf(8, 6, {5, 6}, {2, 3});
  first.sampling.presence_penalty = 1;
  first.sampling.logit_bias = {{3, 0.5f}};
  first.end_tokens = {4};
  second.first_position = 5;
  second.earlier_tokens = {1, 2, 3, 4, 5};
  second.candidate = 1;
  const Step prompt = SampleOf(ScoredOf(StepOf(7, 0, {1, 2, 3, 4, 5, 6}), -1, 1), 2);
  SequenceStart pooled = StartOf(9, 2, {4}, {4});
  pooled.mean_pooling = true;
  const IterationPlan plans[] = {PlanOf(1, 0).Start(first).Step(prompt),
                                 PlanOf(1, 1)
                                     .Copy(1, 5)
                                     .Copy(1, 3, PageKind::kWindow)
                                     .Start(second)
                                     .Step(SampleOf(PreviousSample(7, 6)))
                                     .Step(SampleOf(StepOf(8, 5, {6}))),
                                 PlanOf(1, 2).Release(7).Step(SampleOf(StepOf(8, 6, {9, 10}))),
                                 PlanOf(1, 3).Start(pooled).Step(HiddenOf(StepOf(9, 0, {1, 2})))};
  std::string seed(1, '\0');
  for (const IterationPlan& plan : plans) {
    proto::Plan message;
    EncodePlan(plan, message);
    seed += Framed(message);
  }
  // Numbers that a worker refuses: too many sequences, positions that no context has.
  PlanOf many(1, 4), far(1, 5);
  for (int i = 0; i < 50; ++i) many.Start(StartOf(100 + i, 2, {i % 16}, {i % 16}));
  SequenceStart last = StartOf(200, 4'000'001, {0, 1, 2, 3}, {0, 1, 0, 1});
  last.first_position = 4'000'000;
  far.Start(last);
  std::string hostile(1, '\0');
  for (const IterationPlan& plan : {IterationPlan(many), IterationPlan(far)}) {
    proto::Plan message;
    EncodePlan(plan, message);
    hostile += Framed(message);
  }
  IterationResult result;
  result.steps.resize(2);
  proto::Result plain, detailed;
  EncodeResult(result, plain);
  result.steps[0].outputs = {{.token = 3, .detail = {-0.5f, {{3, -0.5f}, {4, -1.0f}}}}};
  result.steps[1].outputs = {{.target = {-2.0f, {{1, -2.0f}}}}, {.hidden = {0.5f, -1.0f}}};
  EncodeResult(result, detailed);
  return {seed, hostile, "\1" + Framed(plain) + Framed(detailed)};
}

}  // namespace

const FuzzTarget kPlanMessagesTarget = {"plan_messages", 2048, Seeds, Run};

}  // namespace treadle
