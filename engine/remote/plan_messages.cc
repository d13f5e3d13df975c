#include "engine/remote/plan_messages.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <variant>

#include "base/status.h"
#include "engine/remote/control.pb.h"

namespace treadle {
namespace {

// What a step is if it is not the plain one; each bit from kNumTokens to kNextToken announces a
// number in `extra`, in this order.
enum StepKind : uint32_t {
  kNoSample = 1,
  kPreviousSample = 2,   // no explicit tokens
  kNumTokens = 4,        // not 1
  kExplicitTokens = 8,   // neither 0 nor num_tokens (no valid step, but it arrives as it is)
  kTopLogprobs = 16,     // not -1
  kPromptLogprobs = 32,  // not -1
  kNextToken = 64,       // not -1
  kPooling = 128,        // not kNone
  kMasked = 256,
  kAllKinds = 511,
};

// Differences wrap around, so every value survives.
template <typename Unsigned, typename Field>
class Relative {
 public:
  template <typename Value>
  auto Encode(Value value) {
    const auto difference = static_cast<Unsigned>(value) - before_;
    before_ = static_cast<Unsigned>(value);
    return static_cast<Field>(difference);
  }
  template <typename Value>
  Value Decode(Field difference) {
    before_ += static_cast<Unsigned>(difference);
    return static_cast<Value>(before_);
  }

 private:
  Unsigned before_ = 0;
};
using RelativeId = Relative<uint64_t, int64_t>;
using RelativeInt = Relative<uint32_t, int32_t>;

template <typename Field, typename Values>
void Append(const Values& values, Field* field) {
  field->Add(values.begin(), values.end());
}

template <typename Field, typename Values>
void AppendRelative(const Values& values, Field* field) {
  Relative<std::make_unsigned_t<typename Values::value_type>, typename Field::value_type> relative;
  for (const auto value : values) field->Add(relative.Encode(value));
}

template <typename Field, typename Value>
void ReadRelative(const Field& field, std::vector<Value>& values) {
  Relative<std::make_unsigned_t<Value>, typename Field::value_type> relative;
  for (const auto difference : field) values.push_back(relative.template Decode<Value>(difference));
}

absl::Status CheckSize(const char* what, int64_t found, int64_t expected) {
  if (found == expected) return absl::OkStatus();
  return InvalidArgument(what, " has ", found, " entries, expected ", expected);
}

// -- plans ----------------------------------------------------------------------------------------

void EncodeSteps(const std::vector<Step>& steps, control::PlanMessage& message) {
  RelativeId id;
  std::vector<uint32_t> kinds;
  bool all_plain = true;
  for (const Step& step : steps) {
    message.add_sequence(id.Encode(step.sequence));
    message.add_position(step.first_position);
    Append(step.tokens, message.mutable_token());
    uint32_t kind = step.sample ? 0u : uint32_t{kNoSample};
    if (step.masked) kind |= kMasked;
    const auto number = [&](uint32_t bit, bool there, int32_t value) {
      if (!there) return;
      kind |= bit;
      message.add_extra(value);
    };
    const auto explicit_tokens = static_cast<int32_t>(step.tokens.size());
    if (explicit_tokens == 0) kind |= kPreviousSample;
    number(kNumTokens, step.num_tokens != 1, step.num_tokens);
    number(kExplicitTokens, explicit_tokens != 0 && explicit_tokens != step.num_tokens,
           explicit_tokens);
    number(kTopLogprobs, step.top_logprobs != -1, step.top_logprobs);
    number(kPromptLogprobs, step.prompt_logprobs != -1, step.prompt_logprobs);
    number(kNextToken, step.next_token != -1, step.next_token);
    number(kPooling, step.pooling != Pooling::kNone, static_cast<int32_t>(step.pooling));
    kinds.push_back(kind);
    all_plain = all_plain && kind == 0;
  }
  if (!all_plain) Append(kinds, message.mutable_kind());
}

// A number of SamplingParameters, in the field of the message that has its name.
const google::protobuf::FieldDescriptor* FieldOf(const SamplingField& field) {
  const auto* found = control::StartMessage::descriptor()->FindFieldByName(std::string(field.name));
  TREADLE_CHECK(found != nullptr);
  return found;
}

void Put(control::StartMessage& message, const SamplingField& field, float value) {
  message.GetReflection()->SetFloat(&message, FieldOf(field), value);
}
void Put(control::StartMessage& message, const SamplingField& field, int32_t value) {
  message.GetReflection()->SetInt32(&message, FieldOf(field), value);
}
void Take(const control::StartMessage& message, const SamplingField& field, float& value) {
  value = message.GetReflection()->GetFloat(message, FieldOf(field));
}
void Take(const control::StartMessage& message, const SamplingField& field, int32_t& value) {
  value = message.GetReflection()->GetInt32(message, FieldOf(field));
}

void EncodeStart(const SequenceStart& start, control::StartMessage& message) {
  const SamplingParameters& sampling = start.sampling;
  message.set_sequence(start.sequence);
  message.set_prompt_length(start.prompt_length);
  message.set_first_position(start.first_position);
  AppendRelative(start.pages.whole, message.mutable_page());
  AppendRelative(start.pages.window, message.mutable_window_page());
  for (const SamplingField& field : kSamplingFields) {
    std::visit([&](auto member) { Put(message, field, sampling.*member); }, field.member);
  }
  for (const LogitBias& bias : sampling.logit_bias) {
    message.add_bias_token(bias.token);
    message.add_bias(bias.bias);
  }
  message.set_seed(sampling.seed);
  message.set_min_new_tokens(start.min_new_tokens);
  Append(start.end_tokens, message.mutable_end_token());
  message.set_candidate(start.candidate);
  Append(start.earlier_tokens, message.mutable_earlier_token());
}

absl::StatusOr<SequenceStart> DecodeStart(const control::StartMessage& message) {
  TREADLE_RETURN_IF_ERROR(
      CheckSize("plan: start: bias", message.bias_size(), message.bias_token_size()));
  SequenceStart start;
  start.sequence = message.sequence();
  start.prompt_length = message.prompt_length();
  start.first_position = message.first_position();
  ReadRelative(message.page(), start.pages.whole);
  ReadRelative(message.window_page(), start.pages.window);
  SamplingParameters& sampling = start.sampling;
  for (const SamplingField& field : kSamplingFields) {
    std::visit([&](auto member) { Take(message, field, sampling.*member); }, field.member);
  }
  for (int i = 0; i < message.bias_size(); ++i) {
    sampling.logit_bias.push_back({message.bias_token(i), message.bias(i)});
  }
  sampling.seed = message.seed();
  start.min_new_tokens = message.min_new_tokens();
  start.end_tokens.assign(message.end_token().begin(), message.end_token().end());
  start.candidate = message.candidate();
  start.earlier_tokens.assign(message.earlier_token().begin(), message.earlier_token().end());
  return start;
}

template <typename Field>
void EncodeCopies(const std::vector<PageCopy>& copies, Field* field) {
  RelativeInt page;
  for (const PageCopy& copy : copies) {
    field->Add(page.Encode(copy.from));
    field->Add(page.Encode(copy.to));
  }
}

template <typename Field>
absl::Status DecodeCopies(const Field& field, std::vector<PageCopy>& copies) {
  TREADLE_RETURN_IF_ERROR(CheckSize("plan: copy", field.size(), field.size() + field.size() % 2));
  RelativeInt page;
  for (int i = 0; i < field.size(); i += 2) {
    const auto from = page.Decode<int32_t>(field[i]);
    copies.push_back({from, page.Decode<int32_t>(field[i + 1])});
  }
  return absl::OkStatus();
}

// Reads the arrays of steps from their beginnings to their ends.
absl::Status DecodeSteps(const control::PlanMessage& message, std::vector<Step>& steps) {
  const int count = message.sequence_size();
  TREADLE_RETURN_IF_ERROR(CheckSize("plan: position", message.position_size(), count));
  if (message.kind_size() != 0) {
    TREADLE_RETURN_IF_ERROR(CheckSize("plan: kind", message.kind_size(), count));
  }
  steps.reserve(static_cast<size_t>(count));
  RelativeId id;
  int extra = 0, token = 0;  // read so far
  for (int i = 0; i < count; ++i) {
    const uint32_t kind = message.kind_size() == 0 ? 0 : message.kind(i);
    if (kind > kAllKinds) return InvalidArgument("plan: kind is ", kind, " for step ", i);
    Step& step = steps.emplace_back();
    step.sequence = id.Decode<SequenceId>(message.sequence(i));
    step.first_position = message.position(i);
    step.sample = (kind & kNoSample) == 0;
    step.masked = (kind & kMasked) != 0;
    step.num_tokens = 1;
    int32_t explicit_tokens = -1;
    int32_t pooling = 0;
    const std::pair<uint32_t, int32_t*> numbers[] = {
        {kNumTokens, &step.num_tokens},     {kExplicitTokens, &explicit_tokens},
        {kTopLogprobs, &step.top_logprobs}, {kPromptLogprobs, &step.prompt_logprobs},
        {kNextToken, &step.next_token},     {kPooling, &pooling}};
    for (const auto& [bit, value] : numbers) {
      if ((kind & bit) == 0) continue;
      if (extra == message.extra_size()) {
        return InvalidArgument("plan: extra ends before step ", i, " has what it announces");
      }
      *value = message.extra(extra++);
    }
    if (pooling < 0 || pooling >= std::ssize(kPoolings)) {
      return InvalidArgument("plan: pooling is ", pooling, " for step ", i);
    }
    step.pooling = static_cast<Pooling>(pooling);
    if ((kind & kPreviousSample) != 0) continue;
    if ((kind & kExplicitTokens) == 0) explicit_tokens = step.num_tokens;
    if (explicit_tokens < 0 || explicit_tokens > message.token_size() - token) {
      return InvalidArgument("plan: step ", i, " announces ", explicit_tokens, " tokens of ",
                             message.token_size() - token);
    }
    const auto begin = message.token().begin() + token;
    step.tokens.assign(begin, begin + explicit_tokens);
    token += explicit_tokens;
  }
  TREADLE_RETURN_IF_ERROR(CheckSize("plan: extra", message.extra_size(), extra));
  return CheckSize("plan: token", message.token_size(), token);
}

// -- results --------------------------------------------------------------------------------------

constexpr int64_t ExpertUse::*kExpertCounts[] = {&ExpertUse::layers, &ExpertUse::rows,
                                                 &ExpertUse::used, &ExpertUse::most_rows};
constexpr double IterationTimings::*kTimings[] = {
    &IterationTimings::queue, &IterationTimings::receive, &IterationTimings::compute,
    &IterationTimings::sample, &IterationTimings::gap};

bool IsEmpty(const TokenDetail& detail) {
  return detail.logprob == 0 && !std::signbit(detail.logprob) && detail.top.empty();
}

void EncodeDetail(const TokenDetail& detail, control::ResultMessage& message) {
  message.add_logprob(detail.logprob);
  message.add_top_size(static_cast<uint32_t>(detail.top.size()));
  for (const TokenLogprob& top : detail.top) {
    message.add_top_token(top.token);
    message.add_top_logprob(top.logprob);
  }
}

absl::Status CheckEmbeddings(const control::ResultMessage& message) {
  if (message.width_size() != 0) {
    TREADLE_RETURN_IF_ERROR(
        CheckSize("result: width", message.width_size(), message.sequence_size()));
  }
  int64_t floats = 0;
  for (const uint32_t size : message.width()) floats += size;
  return CheckSize("result: embedding", message.embedding().size(), floats);
}

absl::Status CheckDetails(const control::ResultMessage& message) {
  const int64_t steps = message.sequence_size();
  if (message.prompt_details_size() != 0) {
    TREADLE_RETURN_IF_ERROR(
        CheckSize("result: prompt_details", message.prompt_details_size(), steps));
  }
  int64_t details = steps;
  for (const uint32_t count : message.prompt_details()) details += count;
  if (message.logprob_size() == 0 && message.prompt_details_size() == 0) details = 0;
  TREADLE_RETURN_IF_ERROR(CheckSize("result: logprob", message.logprob_size(), details));
  TREADLE_RETURN_IF_ERROR(CheckSize("result: top_size", message.top_size_size(), details));
  int64_t tops = 0;
  for (const uint32_t size : message.top_size()) tops += size;
  TREADLE_RETURN_IF_ERROR(CheckSize("result: top_token", message.top_token_size(), tops));
  return CheckSize("result: top_logprob", message.top_logprob_size(), tops);
}

}  // namespace

void EncodePlan(const IterationPlan& plan, control::PlanMessage& message) {
  message.set_epoch(plan.epoch);
  message.set_iteration(plan.iteration);
  EncodeSteps(plan.steps, message);
  AppendRelative(plan.releases, message.mutable_release());
  EncodeCopies(plan.page_copies.whole, message.mutable_copy());
  EncodeCopies(plan.page_copies.window, message.mutable_window_copy());
  for (const SequenceStart& start : plan.starts) EncodeStart(start, *message.add_start());
  if (plan.stages == StageRange()) return;
  message.mutable_stages()->set_begin(plan.stages.begin);
  message.mutable_stages()->set_end(plan.stages.end);
}

absl::StatusOr<IterationPlan> DecodePlan(const control::PlanMessage& message) {
  IterationPlan plan;
  plan.epoch = message.epoch();
  plan.iteration = message.iteration();
  TREADLE_RETURN_IF_ERROR(DecodeSteps(message, plan.steps));
  ReadRelative(message.release(), plan.releases);
  TREADLE_RETURN_IF_ERROR(DecodeCopies(message.copy(), plan.page_copies.whole));
  TREADLE_RETURN_IF_ERROR(DecodeCopies(message.window_copy(), plan.page_copies.window));
  for (const control::StartMessage& start : message.start()) {
    TREADLE_ASSIGN_OR_RETURN(plan.starts.emplace_back(), DecodeStart(start));
  }
  if (message.has_stages()) plan.stages = {message.stages().begin(), message.stages().end()};
  if (plan.stages.begin < 0 || plan.stages.end < plan.stages.begin) {
    return InvalidArgument("plan: stages ", plan.stages.begin, " to before ", plan.stages.end,
                           " run it");
  }
  return plan;
}

void EncodeMasks(uint64_t epoch, uint64_t iteration, const std::vector<StepMask>& masks,
                 control::MaskMessage& message) {
  message.set_epoch(epoch);
  message.set_iteration(iteration);
  std::string& bytes = *message.mutable_allowed();
  for (const StepMask& mask : masks) {
    message.add_step(mask.step);
    for (const uint32_t word : mask.allowed) {
      for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(word >> shift);
    }
  }
}

absl::StatusOr<std::vector<StepMask>> DecodeMasks(const control::MaskMessage& message) {
  const auto steps = static_cast<size_t>(message.step_size());
  const std::string& bytes = message.allowed();
  if (steps == 0 || bytes.size() % (steps * sizeof(uint32_t)) != 0) {
    return InvalidArgument("masks: allowed has ", bytes.size(), " bytes for ", steps,
                           " steps, expected whole words for each");
  }
  const size_t words = bytes.size() / steps / sizeof(uint32_t);
  std::vector<StepMask> masks(steps);
  size_t at = 0;
  for (size_t i = 0; i < steps; ++i) {
    masks[i].step = message.step(static_cast<int>(i));
    masks[i].allowed.resize(words);
    for (uint32_t& word : masks[i].allowed) {
      for (int shift = 0; shift < 32; shift += 8) {
        word |= uint32_t{static_cast<unsigned char>(bytes[at++])} << shift;
      }
    }
  }
  return masks;
}

void EncodeResult(const IterationResult& result, control::ResultMessage& message) {
  message.set_epoch(result.epoch);
  message.set_iteration(result.iteration);
  RelativeId id;
  bool any_detail = false;
  bool any_prompt_detail = false;
  bool any_embedding = false;
  for (const StepResult& step : result.steps) {
    any_embedding = any_embedding || !step.embedding.empty();
    message.add_sequence(id.Encode(step.sequence));
    message.add_token(step.token);
    any_prompt_detail = any_prompt_detail || !step.prompt_detail.empty();
    any_detail = any_detail || !IsEmpty(step.detail);
  }
  if (any_detail || any_prompt_detail) {
    for (const StepResult& step : result.steps) {
      if (any_prompt_detail) {
        message.add_prompt_details(static_cast<uint32_t>(step.prompt_detail.size()));
      }
      EncodeDetail(step.detail, message);
      for (const TokenDetail& detail : step.prompt_detail) EncodeDetail(detail, message);
    }
  }
  for (size_t i = 0; any_embedding && i < result.steps.size(); ++i) {
    message.add_width(static_cast<uint32_t>(result.steps[i].embedding.size()));
    Append(result.steps[i].embedding, message.mutable_embedding());
  }
  for (const auto timing : kTimings) {
    const double seconds = std::clamp(result.timings.*timing, 0.0, 1e9);
    message.add_nanoseconds(static_cast<uint64_t>(std::llround(seconds * 1e9)));
  }
  for (const auto count : kExpertCounts) {
    if (result.experts.layers > 0)
      message.add_experts(static_cast<uint64_t>(result.experts.*count));
  }
}

absl::StatusOr<IterationResult> DecodeResult(const control::ResultMessage& message) {
  TREADLE_RETURN_IF_ERROR(
      CheckSize("result: token", message.token_size(), message.sequence_size()));
  TREADLE_RETURN_IF_ERROR(
      CheckSize("result: nanoseconds", message.nanoseconds_size(), std::ssize(kTimings)));
  if (message.experts_size() != 0) {
    TREADLE_RETURN_IF_ERROR(
        CheckSize("result: experts", message.experts_size(), std::ssize(kExpertCounts)));
  }
  TREADLE_RETURN_IF_ERROR(CheckDetails(message));
  TREADLE_RETURN_IF_ERROR(CheckEmbeddings(message));
  IterationResult result;
  result.epoch = message.epoch();
  result.iteration = message.iteration();
  result.steps.resize(static_cast<size_t>(message.sequence_size()));
  RelativeId id;
  int detail = 0, top = 0, embedding = 0;  // read so far
  const auto next_detail = [&] {
    TokenDetail next;
    next.logprob = message.logprob(detail);
    for (uint32_t left = message.top_size(detail++); left > 0; --left, ++top) {
      next.top.push_back({message.top_token(top), message.top_logprob(top)});
    }
    return next;
  };
  for (int i = 0; i < message.sequence_size(); ++i) {
    StepResult& step = result.steps[i];
    step.sequence = id.Decode<SequenceId>(message.sequence(i));
    step.token = message.token(i);
    if (message.width_size() != 0) {
      const auto begin = message.embedding().begin() + embedding;
      embedding += static_cast<int>(message.width(i));
      step.embedding.assign(begin, message.embedding().begin() + embedding);
    }
    if (message.logprob_size() == 0) continue;
    step.detail = next_detail();
    const uint32_t prompt = message.prompt_details_size() == 0 ? 0 : message.prompt_details(i);
    for (uint32_t k = 0; k < prompt; ++k) step.prompt_detail.push_back(next_detail());
  }
  for (size_t i = 0; i < std::size(kTimings); ++i) {
    result.timings.*kTimings[i] =
        static_cast<double>(message.nanoseconds(static_cast<int>(i))) / 1e9;
  }
  for (int i = 0; i < message.experts_size(); ++i) {
    const uint64_t count = std::min<uint64_t>(message.experts(i), INT64_MAX);
    result.experts.*kExpertCounts[i] = static_cast<int64_t>(count);
  }
  return result;
}

}  // namespace treadle
