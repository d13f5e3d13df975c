#include "server/openai/body_fields.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_split.h"
#include "base/json_file.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/openai/tools/generic_tools.h"
#include "server/openai/tools/reasoning.h"
#include "server/openai/tools/tool_request.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

// Checks what holds between several fields.
absl::Status ConcludeFields(std::string_view body, OpenAiRequest& to) {
  if (to.prompts.empty()) return InvalidArgument(to.chat ? "messages" : "prompt", " is missing");
  const int32_t n = to.common.sampling.num_candidates;
  if (to.best_of && *to.best_of != n) {
    return InvalidArgument("best_of is ", *to.best_of, ", expected n (", n,
                           "): there is no choice of the best");
  }
  if (to.stream && to.prompt_logprobs) {
    return InvalidArgument("prompt_logprobs is given, expected stream to be false then");
  }
  to.common.constraint = std::move(to.form.constraint);
  if (!to.form.schema_path.empty()) {
    for (const std::string_view name : to.form.schema_path) body = MemberText(body, name);
    to.common.constraint->text = body;
  }
  if (to.echo && to.common.logprobs) {
    std::optional<int32_t>& most = to.common.prompt_logprobs;
    most = std::max(most.value_or(0), *to.common.logprobs);
  }
  std::optional<int32_t>& most_new = to.common.stopping.max_new_tokens;
  if (most_new == -1) {  // llama.cpp's
    most_new.reset();
    to.common.stopping.without_limit = true;
  }
  if (to.echo && most_new == 0) {
    to.prompt_only = true;
    most_new = 1;
  }
  return absl::OkStatus();
}

// `body`: what the request was read from. Tools that may not be called are not told to the model.
absl::Status ConcludeTools(std::string_view body, const ServedModel& model, OpenAiRequest& to) {
  const bool demanded = to.tool_choice.mode == ToolChoice::Mode::kRequired;
  if (demanded && to.tools.empty()) {
    return InvalidArgument("tool_choice is a demand for a call, expected tools then");
  }
  const bool offered = !to.tools.empty() && to.tool_choice.mode != ToolChoice::Mode::kNone;
  if ((!offered && !to.knows_tools) || !model.chat_template) return absl::OkStatus();
  const std::string_view written = !offered                      ? ""
                                   : to.tools_as_of_chat.empty() ? MemberText(body, "tools")
                                                                 : to.tools_as_of_chat;
  const ToolFormat* format = FindToolFormat(model.chat_template->source());
  const bool generic = format == nullptr;
  if (generic) {
    format = &GenericToolFormat();
    WriteToolsAsText(written, *model.chat_template,
                     std::get<std::vector<ChatMessage>>(to.prompts[0]));
  }
  if (!offered) return absl::OkStatus();
  // An answer that is nothing but calls, or a form, is held to it.
  const bool held = demanded || to.common.constraint;
  to.reading.tools = held ? &format->Held() : format;
  for (const Tool& tool : to.tools) to.reading.texts[tool.name] = tool.texts;
  if (!generic) to.common.tools = written;
  // Some models mark calls with special tokens.
  to.common.special_tokens = true;
  // A model that was never taught to call writes broken JSON easily.
  const bool always = generic && model.constraints && model.constraints->Works();
  return ConstrainCalls(written, to.tools, to.tool_choice, to.reading.parallel, always,
                        *to.reading.tools, to.common.constraint);
}

// Notes what the template shows of how the model thinks. `to.common.constraint` holds what is said.
void ConcludeReasoning(const ServedModel& model, OpenAiRequest& to) {
  if (!model.chat_template || !model.tokenizer) return;
  if (!to.template_arguments.empty()) to.common.template_arguments = to.template_arguments.dump();
  to.reading.reasoning = FindReasoningFormat(model.chat_template->source());
  if (to.reading.reasoning == nullptr) return;
  to.common.special_tokens = true;  // some mark with them
  if (to.common.continue_final_message) {
    const auto& messages = std::get<std::vector<ChatMessage>>(to.prompts[0]);
    const std::string text = messages.empty() ? "" : messages.back().content.value_or("");
    to.reading.thinking = ThinkingWithin(text, *to.reading.reasoning);
  } else {
    to.reading.thinking = ThinkingOfChats(to.common, *to.reading.reasoning, model);
  }
  std::optional<Constraint>& constraint = to.common.constraint;
  if (!constraint || to.reading.thinking == Thinking::kOver) return;
  const ReasoningFormat& format = *to.reading.reasoning;
  // A form allows no control tokens, so the prompt itself goes on with what is said.
  if (format.harmony()) {
    to.common.prompt_end = "<|channel|>final<|message|>";
  } else if (ClosesByControlToken(format, model)) {
    if (to.reading.thinking == Thinking::kBegun) to.common.prompt_end = format.close;
    to.reading.thinking = Thinking::kOver;
  } else {
    constraint->thought = {std::string(format.open), std::string(format.close),
                           to.reading.thinking == Thinking::kBegun};
  }
}

}  // namespace

absl::StatusOr<Json> ReadBody(std::string_view body, const ServedModel& model) {
  if (const size_t bad = FindInvalidUtf8(body); bad != std::string_view::npos) {
    return InvalidArgument("the body is not valid UTF-8 at byte ", bad);
  }
  TREADLE_ASSIGN_OR_RETURN(Json object, ParseJsonObject(body, "the body", kMaxJsonValues));
  const Json name = object.value("model", Json());
  if (name.is_null()) return object;
  if (!name.is_string()) return Expected("model", name, "a string");
  if (model.IsCalled(name.get_ref<const std::string&>())) return object;
  if (model.IsAdapter(name.get_ref<const std::string&>())) return object;
  std::string known = Json(model.name).dump();
  for (const std::string& other : model.names) {
    if (other != model.name) known += " or " + Json(other).dump();
  }
  return NotFound("the model ", Cut(name.dump(), kShown), " does not exist, expected ", known);
}

std::string AdapterNamed(const Json& object, const ServedModel& model) {
  const Json name = object.value("model", Json());
  return name.is_string() && model.IsAdapter(name.get<std::string>()) ? name.get<std::string>()
                                                                      : "";
}

absl::Status PassOver(const OpenAiField& field, const Json& value) {
  if (field.standing == OpenAiField::Standing::kIgnored) return absl::OkStatus();
  for (const absl::string_view only :
       absl::StrSplit(absl::string_view(field.only.data(), field.only.size()), " or ")) {
    if (value == Json::parse(only.begin(), only.end(), nullptr, false)) return absl::OkStatus();
  }
  if (field.standing == OpenAiField::Standing::kOnly)
    return Expected(field.name, value, field.only);
  return InvalidArgument(field.name, " is not supported");
}

absl::Status ReadSampling(const SamplingField& field, const Json& value, OpenAiRequest& to) {
  if (const auto* real = std::get_if<float SamplingParameters::*>(&field.member)) {
    if (!value.is_number()) return Expected(field.name, value, "a number");
    to.common.sampling.parameters.*(*real) = value.get<float>();
    return absl::OkStatus();
  }
  TREADLE_ASSIGN_OR_RETURN(const int32_t top_k, ReadInt(field.name, value));
  to.common.sampling.parameters.top_k = top_k == -1 ? 0 : top_k;  // both mean: off
  return absl::OkStatus();
}

absl::Status ReadReasoningEffort(const std::string& name, const Json& value, OpenAiRequest& to) {
  constexpr std::string_view kEfforts[] = {"none", "minimal", "low", "medium", "high", "xhigh"};
  TREADLE_ASSIGN_OR_RETURN(const std::string effort, ReadText(name, value));
  if (std::ranges::find(kEfforts, effort) == std::end(kEfforts)) {
    return Expected(name, value, R"("none", "minimal", "low", "medium", "high" or "xhigh")");
  }
  const bool thinks = effort != kEfforts[0];
  Json arguments = {{"enable_thinking", thinks}, {"thinking", thinks}};
  if (thinks) arguments["reasoning_effort"] = effort;
  arguments.update(to.template_arguments);  // which comes first, and says more
  to.template_arguments = std::move(arguments);
  return absl::OkStatus();
}

absl::Status ConcludeBody(std::string_view body, const ServedModel& model, OpenAiRequest& to) {
  TREADLE_RETURN_IF_ERROR(ConcludeFields(body, to));
  TREADLE_RETURN_IF_ERROR(ConcludeTools(body, model, to));
  if (to.chat) ConcludeReasoning(model, to);
  if (to.common.constraint) to.common.constraint->any_whitespace = to.form.any_whitespace;
  return absl::OkStatus();
}

}  // namespace treadle
