#include "models/text/jinja/chat_template.h"

#include <algorithm>

#include "base/status.h"
#include "models/text/jinja/ast.h"
#include "models/text/jinja/interpreter.h"
#include "models/text/jinja/library.h"
#include "models/text/unicode.h"

namespace treadle {
namespace {

constexpr size_t kMaxSource = size_t{1} << 20;

absl::Status CheckMessages(const std::vector<ChatMessage>& messages) {
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    std::vector<std::pair<const char*, std::string_view>> fields = {
        {"role", message.role},
        {"content", message.content ? *message.content : std::string_view()},
        {"tool_call_id", message.tool_call_id},
        {"name", message.name},
        {"reasoning", message.reasoning}};
    for (const ToolCall& call : message.tool_calls) {
      fields.insert(fields.end(), {{"tool_calls.id", call.id}, {"tool_calls.name", call.name}});
    }
    for (const auto& [name, text] : fields) {
      const size_t invalid = FindInvalidUtf8(text);
      if (invalid == std::string::npos) continue;
      return InvalidArgument("messages[", i, "].", name, " is not valid UTF-8 at byte ", invalid);
    }
  }
  return absl::OkStatus();
}

// The budget of a rendering of these.
jinja::Budget BudgetFor(const std::vector<ChatMessage>& messages, const ChatOptions& options) {
  size_t count = messages.size(), bytes = options.tools.size() + options.arguments.size();
  for (const ChatMessage& message : messages) {
    bytes += message.role.size() + message.content.value_or("").size() +
             message.tool_call_id.size() + message.name.size() + message.reasoning.size();
    count += message.tool_calls.size();
    for (const ToolCall& call : message.tool_calls) {
      bytes += call.id.size() + call.name.size() + call.arguments.size();
    }
  }
  jinja::Budget budget{.deadline = options.deadline};
  budget.Add(count, bytes);
  return budget;
}

// As transformers has it: what was not told is no member. `without`: a content that is not there.
jinja::Value MessageValue(jinja::Context& context, const ChatMessage& message,
                          const jinja::Value& without) {
  using jinja::Value;
  jinja::Dict members = {
      {"role", context.MakeString(message.role)},
      {"content", message.content ? context.MakeString(*message.content) : without}};
  jinja::List calls;
  for (const ToolCall& call : message.tool_calls) {
    Value function = context.MakeDict({{"name", context.MakeString(call.name)},
                                       {"arguments", jinja::FromJson(context, call.arguments)}});
    calls.push_back(context.MakeDict({{"id", context.MakeString(call.id)},
                                      {"type", context.MakeString("function")},
                                      {"function", std::move(function)}}));
  }
  if (!calls.empty()) members.emplace_back("tool_calls", context.MakeList(std::move(calls)));
  if (!message.tool_call_id.empty()) {
    members.emplace_back("tool_call_id", context.MakeString(message.tool_call_id));
  }
  if (!message.name.empty()) members.emplace_back("name", context.MakeString(message.name));
  if (!message.reasoning.empty()) {
    const Value reasoning = context.MakeString(message.reasoning);
    for (const char* name : {"reasoning_content", "reasoning"}) {
      members.emplace_back(name, reasoning);
    }
    // gpt-oss' template refuses this one beside a content.
    if (message.content.value_or("").empty()) members.emplace_back("thinking", reasoning);
  }
  return context.MakeDict(std::move(members));
}

// The values that transformers hands to a template: no documents here.
jinja::Named Variables(jinja::Context& context, const std::vector<ChatMessage>& messages,
                       const ChatOptions& options, const jinja::Value& without) {
  using jinja::Value;
  jinja::List list;
  for (const ChatMessage& message : messages) {
    list.push_back(MessageValue(context, message, without));
  }
  std::string now;
  for (const auto& [name, value] : options.variables) {
    if (name == "now") now = value;
  }
  jinja::Named variables = jinja::GlobalFunctions(now);
  variables.emplace_back("messages", context.MakeList(std::move(list)));
  variables.emplace_back(
      "tools", options.tools.empty() ? Value(jinja::None{}) : FromJson(context, options.tools));
  variables.emplace_back("documents", jinja::None{});
  variables.emplace_back("add_generation_prompt", options.add_generation_prompt);
  variables.emplace_back("bos_token", Value::String(options.bos_token));
  variables.emplace_back("eos_token", Value::String(options.eos_token));
  for (const auto& [name, value] : options.variables) {
    variables.emplace_back(name, Value::String(value));
  }
  if (!options.arguments.empty()) {
    const Value arguments = FromJson(context, options.arguments);
    for (const auto& [name, value] : arguments.AsDict()) {
      variables.emplace_back(std::string(name.AsString()), value);
    }
  }
  return variables;
}

absl::Status ErrorOf(const jinja::TemplateError& error) {
  return absl::Status(error.code, Str("chat template, line ", error.line, ": ", error.message));
}

}  // namespace

struct ChatTemplate::Program {
  std::string source;
  std::vector<jinja::NodePtr> statements;
};

ChatTemplate::ChatTemplate(std::unique_ptr<Program> program) : program_(std::move(program)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

absl::StatusOr<ChatTemplate> ChatTemplate::Parse(std::string_view source) {
  if (source.size() > kMaxSource) {
    return InvalidArgument("chat template of ", source.size(), " bytes, expected at most ",
                           kMaxSource);
  }
  const size_t invalid = FindInvalidUtf8(source);
  if (invalid != std::string_view::npos) {
    return InvalidArgument("chat template is not valid UTF-8 at byte ", invalid);
  }
  try {
    auto program = std::make_unique<Program>();
    program->source = source;
    program->statements = jinja::ParseTemplate(source);
    return ChatTemplate(std::move(program));
  } catch (const jinja::TemplateError& error) {
    return ErrorOf(error);
  }
}

absl::StatusOr<std::string> ChatTemplate::Render(const std::vector<ChatMessage>& messages,
                                                 const ChatOptions& options) const {
  TREADLE_RETURN_IF_ERROR(CheckMessages(messages));
  const auto render = [&](const jinja::Value& without) -> absl::StatusOr<std::string> {
    jinja::Context context(BudgetFor(messages, options));
    try {
      const jinja::Named variables = Variables(context, messages, options, without);
      return jinja::Interpreter(context, variables).Render(program_->statements);
    } catch (const jinja::TemplateError& error) {
      return ErrorOf(error);
    }
  };
  auto text = render(jinja::None{});
  const auto lacks = [](const ChatMessage& message) { return !message.content; };
  if (!absl::IsInvalidArgument(text.status()) || std::ranges::none_of(messages, lacks)) return text;
  auto other = render(jinja::Value::String(""));
  return other.ok() ? other : text;
}

const std::string& ChatTemplate::source() const { return program_->source; }

absl::Status ChatTemplate::CheckCost() const {
  for (const int turns : {1, 3, 41}) {
    std::vector<ChatMessage> messages;
    for (int i = 0; i < turns; ++i)
      messages.push_back({i % 2 ? "assistant" : "user", "a few words"});
    const absl::Status status = Render(messages, {}).status();
    if (absl::IsResourceExhausted(status)) return status;
  }
  return absl::OkStatus();
}

}  // namespace treadle
