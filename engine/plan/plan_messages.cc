#include "engine/plan/plan_messages.h"

#include <cmath>
#include <iterator>
#include <string>
#include <variant>

#include "base/status.h"
#include "engine/plan/plan.pb.h"

namespace treadle {
namespace {

template <typename Values, typename Field>
void Append(const Values& values, Field* field) {
  field->Add(values.begin(), values.end());
}

template <typename Field>
auto VectorOf(const Field& field) {
  return std::vector<typename Field::value_type>(field.begin(), field.end());
}

absl::Status CheckSize(const char* what, int found, int expected) {
  if (found == expected) return absl::OkStatus();
  return InvalidArgument(what, " has ", found, " entries, expected ", expected);
}

absl::StatusOr<PageKind> KindIn(proto::PageKind kind) {
  for (const PageKind known : kPageKinds) {
    if (static_cast<int>(known) == static_cast<int>(kind)) return known;
  }
  return InvalidArgument("plan: kind of pages is ", static_cast<int>(kind), ", expected less than ",
                         std::size(kPageKinds));
}
proto::PageKind KindOf(PageKind kind) { return static_cast<proto::PageKind>(kind); }

// -- plans ----------------------------------------------------------------------------------------

// The field of the message that has the name of a number of SamplingParameters.
const google::protobuf::FieldDescriptor* FieldOf(const SamplingField& field) {
  const auto* found = proto::Sampling::descriptor()->FindFieldByName(std::string(field.name));
  TREADLE_CHECK(found != nullptr);
  return found;
}

void EncodeSampling(const SamplingParameters& sampling, proto::Sampling& message) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  for (const SamplingField& field : kSamplingFields) {
    if (const auto* real = std::get_if<float SamplingParameters::*>(&field.member)) {
      reflection.SetFloat(&message, FieldOf(field), sampling.**real);
    } else {
      const auto member = std::get<int32_t SamplingParameters::*>(field.member);
      reflection.SetInt32(&message, FieldOf(field), sampling.*member);
    }
  }
  for (const LogitBias& bias : sampling.logit_bias) {
    message.add_bias_tokens(bias.token);
    message.add_biases(bias.bias);
  }
  message.set_seed(sampling.seed);
}

absl::StatusOr<SamplingParameters> DecodeSampling(const proto::Sampling& message) {
  TREADLE_RETURN_IF_ERROR(
      CheckSize("plan: biases", message.biases_size(), message.bias_tokens_size()));
  SamplingParameters sampling;
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  for (const SamplingField& field : kSamplingFields) {
    if (const auto* real = std::get_if<float SamplingParameters::*>(&field.member)) {
      sampling.** real = reflection.GetFloat(message, FieldOf(field));
    } else {
      const auto member = std::get<int32_t SamplingParameters::*>(field.member);
      sampling.*member = reflection.GetInt32(message, FieldOf(field));
    }
  }
  for (int i = 0; i < message.biases_size(); ++i) {
    sampling.logit_bias.push_back({message.bias_tokens(i), message.biases(i)});
  }
  sampling.seed = message.seed();
  return sampling;
}

void EncodeStart(const SequenceStart& start, proto::Start& message) {
  message.set_sequence(start.sequence);
  message.set_prompt_length(start.prompt_length);
  message.set_first_position(start.first_position);
  for (const PageKind kind : kPageKinds) {
    if (start.pages[kind].empty()) continue;
    proto::Pages& pages = *message.add_pages();
    pages.set_kind(KindOf(kind));
    Append(start.pages[kind], pages.mutable_pages());
  }
  EncodeSampling(start.sampling, *message.mutable_sampling());
  message.set_min_new_tokens(start.min_new_tokens);
  Append(start.end_tokens, message.mutable_end_tokens());
  message.set_candidate(start.candidate);
  Append(start.earlier_tokens, message.mutable_earlier_tokens());
  message.set_adapter(start.adapter);
  message.set_mean_pooling(start.mean_pooling);
}

absl::StatusOr<SequenceStart> DecodeStart(const proto::Start& message) {
  SequenceStart start;
  start.sequence = message.sequence();
  start.prompt_length = message.prompt_length();
  start.first_position = message.first_position();
  for (const proto::Pages& pages : message.pages()) {
    TREADLE_ASSIGN_OR_RETURN(const PageKind kind, KindIn(pages.kind()));
    start.pages[kind] = VectorOf(pages.pages());
  }
  TREADLE_ASSIGN_OR_RETURN(start.sampling, DecodeSampling(message.sampling()));
  start.min_new_tokens = message.min_new_tokens();
  start.end_tokens = VectorOf(message.end_tokens());
  start.candidate = message.candidate();
  start.earlier_tokens = VectorOf(message.earlier_tokens());
  start.adapter = message.adapter();
  start.mean_pooling = message.mean_pooling();
  return start;
}

void EncodeStep(const Step& step, proto::Step& message) {
  message.set_sequence(step.sequence);
  message.set_first_position(step.first_position);
  message.set_num_tokens(step.num_tokens);
  Append(step.tokens, message.mutable_tokens());
  for (const RowOutput& output : step.outputs) {
    proto::RowOutput& asked = *message.add_outputs();
    asked.set_row(output.row);
    asked.set_sample(output.sample);
    asked.set_masked(output.masked);
    asked.set_hidden(output.hidden);
    if (output.top_logprobs != -1) asked.set_top_logprobs(output.top_logprobs);
    if (output.target != -1) asked.set_target(output.target);
    asked.set_target_logprobs(output.target_logprobs);
  }
}

Step DecodeStep(const proto::Step& message) {
  Step step;
  step.sequence = message.sequence();
  step.first_position = message.first_position();
  step.num_tokens = message.num_tokens();
  step.tokens = VectorOf(message.tokens());
  for (const proto::RowOutput& asked : message.outputs()) {
    step.outputs.push_back({.row = asked.row(),
                            .sample = asked.sample(),
                            .masked = asked.masked(),
                            .hidden = asked.hidden(),
                            .top_logprobs = asked.has_top_logprobs() ? asked.top_logprobs() : -1,
                            .target = asked.has_target() ? asked.target() : -1,
                            .target_logprobs = asked.target_logprobs()});
  }
  return step;
}

// -- results --------------------------------------------------------------------------------------

bool IsEmpty(const TokenDetail& detail) {
  return detail.top.empty() && detail.logprob == 0 && !std::signbit(detail.logprob);
}

void EncodeDetail(const TokenDetail& detail, proto::TokenDetail& message) {
  message.set_logprob(detail.logprob);
  for (const TokenLogprob& top : detail.top) {
    message.add_tokens(top.token);
    message.add_logprobs(top.logprob);
  }
}

absl::Status DecodeDetail(const proto::TokenDetail& message, TokenDetail& detail) {
  TREADLE_RETURN_IF_ERROR(
      CheckSize("result: logprobs", message.logprobs_size(), message.tokens_size()));
  detail.logprob = message.logprob();
  for (int i = 0; i < message.tokens_size(); ++i) {
    detail.top.push_back({message.tokens(i), message.logprobs(i)});
  }
  return absl::OkStatus();
}

}  // namespace

void EncodePlan(const IterationPlan& plan, proto::Plan& message) {
  TREADLE_CHECK(plan.page_stores.empty() && plan.page_loads.empty());
  message.set_epoch(plan.epoch);
  message.set_iteration(plan.iteration);
  Append(plan.releases, message.mutable_releases());
  for (const PageKind kind : kPageKinds) {
    if (plan.page_copies[kind].empty()) continue;
    proto::PageCopies& copies = *message.add_page_copies();
    copies.set_kind(KindOf(kind));
    for (const PageCopy& copy : plan.page_copies[kind]) {
      copies.add_from(copy.from);
      copies.add_to(copy.to);
    }
  }
  for (const SequenceStart& start : plan.starts) EncodeStart(start, *message.add_starts());
  for (const Step& step : plan.steps) EncodeStep(step, *message.add_steps());
  Append(plan.replicas, message.mutable_replicas());
  if (plan.stages == StageRange()) return;
  message.mutable_stages()->set_begin(plan.stages.begin);
  message.mutable_stages()->set_end(plan.stages.end);
}

absl::StatusOr<IterationPlan> DecodePlan(const proto::Plan& message) {
  IterationPlan plan;
  plan.epoch = message.epoch();
  plan.iteration = message.iteration();
  plan.releases = VectorOf(message.releases());
  for (const proto::PageCopies& copies : message.page_copies()) {
    TREADLE_RETURN_IF_ERROR(CheckSize("plan: to", copies.to_size(), copies.from_size()));
    TREADLE_ASSIGN_OR_RETURN(const PageKind kind, KindIn(copies.kind()));
    for (int i = 0; i < copies.from_size(); ++i) {
      plan.page_copies[kind].push_back({copies.from(i), copies.to(i)});
    }
  }
  for (const proto::Start& start : message.starts()) {
    TREADLE_ASSIGN_OR_RETURN(plan.starts.emplace_back(), DecodeStart(start));
  }
  plan.steps.reserve(static_cast<size_t>(message.steps_size()));
  for (const proto::Step& step : message.steps()) plan.steps.push_back(DecodeStep(step));
  plan.replicas = VectorOf(message.replicas());
  if (message.has_stages()) plan.stages = {message.stages().begin(), message.stages().end()};
  if (plan.stages.begin < 0 || plan.stages.end < plan.stages.begin) {
    return InvalidArgument("plan: stages ", plan.stages.begin, " to before ", plan.stages.end,
                           " run it");
  }
  return plan;
}

void EncodeMasks(uint64_t epoch, uint64_t iteration, const std::vector<OutputMask>& masks,
                 proto::Masks& message) {
  message.set_epoch(epoch);
  message.set_iteration(iteration);
  for (const OutputMask& mask : masks) {
    proto::OutputMask& out = *message.add_masks();
    out.set_step(mask.step);
    out.set_output(mask.output);
    for (const uint32_t word : mask.allowed) {
      for (int shift = 0; shift < 32; shift += 8) {
        *out.mutable_allowed() += static_cast<char>(word >> shift);
      }
    }
  }
}

absl::StatusOr<std::vector<OutputMask>> DecodeMasks(const proto::Masks& message) {
  std::vector<OutputMask> masks;
  for (const proto::OutputMask& in : message.masks()) {
    const std::string& bytes = in.allowed();
    if (bytes.size() % sizeof(uint32_t) != 0) {
      return InvalidArgument("masks: allowed has ", bytes.size(), " bytes, expected whole words");
    }
    OutputMask& mask = masks.emplace_back();
    mask.step = in.step();
    mask.output = in.output();
    mask.allowed.resize(bytes.size() / sizeof(uint32_t));
    for (size_t i = 0; i < bytes.size(); ++i) {
      mask.allowed[i / 4] |= uint32_t{static_cast<unsigned char>(bytes[i])} << (i % 4 * 8);
    }
  }
  return masks;
}

void EncodeResult(const IterationResult& result, proto::Result& message) {
  message.set_epoch(result.epoch);
  message.set_iteration(result.iteration);
  for (const StepResult& step : result.steps) {
    proto::StepResult& out = *message.add_steps();
    out.set_sequence(step.sequence);
    for (const RowResult& row : step.outputs) {
      proto::RowResult& given = *out.add_outputs();
      if (row.token != -1) given.set_token(row.token);
      if (!IsEmpty(row.detail)) EncodeDetail(row.detail, *given.mutable_detail());
      if (!IsEmpty(row.target)) EncodeDetail(row.target, *given.mutable_target());
      Append(row.hidden, given.mutable_hidden());
    }
  }
  proto::Timings& timings = *message.mutable_timings();
  timings.set_queue(result.timings.queue);
  timings.set_receive(result.timings.receive);
  timings.set_compute(result.timings.compute);
  timings.set_sample(result.timings.sample);
  timings.set_gap(result.timings.gap);
  proto::ExpertUse& experts = *message.mutable_experts();
  experts.set_layers(result.experts.layers);
  experts.set_rows(result.experts.rows);
  experts.set_used(result.experts.used);
  experts.set_most_rows(result.experts.most_rows);
}

absl::StatusOr<IterationResult> DecodeResult(const proto::Result& message) {
  IterationResult result;
  result.epoch = message.epoch();
  result.iteration = message.iteration();
  for (const proto::StepResult& in : message.steps()) {
    StepResult& step = result.steps.emplace_back();
    step.sequence = in.sequence();
    for (const proto::RowResult& given : in.outputs()) {
      RowResult& row = step.outputs.emplace_back();
      row.token = given.has_token() ? given.token() : -1;
      TREADLE_RETURN_IF_ERROR(DecodeDetail(given.detail(), row.detail));
      TREADLE_RETURN_IF_ERROR(DecodeDetail(given.target(), row.target));
      row.hidden = VectorOf(given.hidden());
    }
  }
  const proto::Timings& timings = message.timings();
  result.timings = {.queue = timings.queue(),
                    .receive = timings.receive(),
                    .compute = timings.compute(),
                    .sample = timings.sample(),
                    .gap = timings.gap()};
  const proto::ExpertUse& experts = message.experts();
  result.experts = {.layers = experts.layers(),
                    .rows = experts.rows(),
                    .used = experts.used(),
                    .most_rows = experts.most_rows()};
  return result;
}

void EncodePages(const PageCounts& pages, proto::PageCounts& message) {
  message.set_whole(pages[PageKind::kWhole]);
  message.set_window(pages[PageKind::kWindow]);
}

PageCounts DecodePages(const proto::PageCounts& message) {
  return {message.whole(), message.window()};
}

}  // namespace treadle
