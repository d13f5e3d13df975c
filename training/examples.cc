#include "training/examples.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/json_file.h"
#include "base/mapped_file.h"
#include "base/status.h"
#include "models/text/jinja/chat_template.h"
#include "models/text/tokenizer.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

class Reader {
 public:
  Reader(const Checkpoint& checkpoint, const Tokenizer& tokenizer, const ExampleOptions& options)
      : checkpoint_(checkpoint), tokenizer_(tokenizer), options_(options) {}

  absl::StatusOr<Example> Read(const Json& line) {
    Example example;
    chat_ = line.contains("messages");
    if (chat_) {
      TREADLE_RETURN_IF_ERROR(ReadMessages(line["messages"], example));
    } else if (line.contains("prompt") || line.contains("completion")) {
      TREADLE_ASSIGN_OR_RETURN(const std::string prompt, Text(line, "prompt"));
      TREADLE_ASSIGN_OR_RETURN(const std::string completion, Text(line, "completion"));
      TREADLE_RETURN_IF_ERROR(Append(prompt, options_.train_on_prompt, true, example));
      TREADLE_RETURN_IF_ERROR(Append(completion, true, prompt.empty(), example));
      End(example);
    } else if (line.contains("text")) {
      TREADLE_ASSIGN_OR_RETURN(const std::string text, Text(line, "text"));
      TREADLE_RETURN_IF_ERROR(Append(text, true, true, example));
      End(example);
    } else {
      return InvalidArgument("has neither \"messages\" nor \"prompt\" nor \"text\"");
    }
    return example;
  }

 private:
  static absl::StatusOr<std::string> Text(const Json& object, const char* name) {
    const auto found = object.find(name);
    if (found == object.end() || !found->is_string()) {
      return InvalidArgument("\"", name, "\" is not there, or no string");
    }
    return found->get<std::string>();
  }

  // Tokens of text; with BOS, where the model wants it, if `begins`.
  absl::Status Append(const std::string& text, bool counts, bool begins, Example& example) {
    if (text.empty()) return absl::OkStatus();
    TREADLE_ASSIGN_OR_RETURN(
        std::vector<int32_t> tokens,
        tokenizer_.Encode(text, {.add_special = false, .parse_special = chat_}));
    const TokenizerSpec& spec = tokenizer_.spec();
    if (begins && spec.add_bos && !chat_ && spec.bos >= 0) tokens.insert(tokens.begin(), spec.bos);
    example.tokens.insert(example.tokens.end(), tokens.begin(), tokens.end());
    example.counts.resize(example.tokens.size(), counts);
    return absl::OkStatus();
  }

  void End(Example& example) const {
    if (tokenizer_.spec().eos < 0) return;
    example.tokens.push_back(tokenizer_.spec().eos);
    example.counts.push_back(true);
  }

  absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& messages, bool prompt) {
    const TokenizerSpec& spec = tokenizer_.spec();
    const auto token = [&](int32_t id) {
      return id >= 0 ? tokenizer_.TokenBytes(id, /*special=*/true) : std::string();
    };
    ChatOptions options;
    options.add_generation_prompt = prompt;
    options.bos_token = token(spec.bos);
    options.eos_token = token(spec.eos);
    return template_->Render(messages, options);
  }

  // Text that the template adds with an answer, behind its prompt for one, counts.
  absl::Status ReadMessages(const Json& list, Example& example) {
    if (!template_.has_value()) {
      if (checkpoint_.chat_template().empty()) {
        return InvalidArgument("has \"messages\", but the model has no chat template");
      }
      TREADLE_ASSIGN_OR_RETURN(template_, ChatTemplate::Parse(checkpoint_.chat_template()));
    }
    if (!list.is_array() || list.empty()) return InvalidArgument("\"messages\" is no list");
    std::vector<ChatMessage> messages;
    std::string done;  // as text, and in the example
    const auto advance = [&](const std::string& text, bool counts) -> absl::Status {
      if (!text.starts_with(done)) {
        return InvalidArgument("the chat template changes earlier messages as later ones come");
      }
      TREADLE_RETURN_IF_ERROR(
          Append(text.substr(done.size()), counts || options_.train_on_prompt, false, example));
      done = text;
      return absl::OkStatus();
    };
    for (const Json& message : list) {
      if (!message.is_object()) return InvalidArgument("a message is no object");
      TREADLE_ASSIGN_OR_RETURN(const std::string role, Text(message, "role"));
      TREADLE_ASSIGN_OR_RETURN(const std::string content, Text(message, "content"));
      const bool answer = role == "assistant";
      if (answer && !messages.empty()) {
        TREADLE_ASSIGN_OR_RETURN(const std::string before, Render(messages, true));
        TREADLE_RETURN_IF_ERROR(advance(before, false));
      }
      messages.push_back({.role = role, .content = content});
      if (!answer && &message != &list.back()) continue;  // rendered with what follows
      TREADLE_ASSIGN_OR_RETURN(const std::string text, Render(messages, false));
      TREADLE_RETURN_IF_ERROR(advance(text, answer));
    }
    return absl::OkStatus();
  }

  const Checkpoint& checkpoint_;
  const Tokenizer& tokenizer_;
  const ExampleOptions& options_;
  std::optional<ChatTemplate> template_;
  bool chat_ = false;  // the line is a conversation: texts hold control tokens
};

}  // namespace

absl::StatusOr<Examples> ReadExamples(const std::string& path, const Checkpoint& checkpoint,
                                      const ExampleOptions& options) {
  if (checkpoint.tokenizer() == nullptr) {
    return InvalidArgument(checkpoint.path(), " has no tokenizer, which --data needs");
  }
  TREADLE_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Create(*checkpoint.tokenizer()));
  const auto file = MappedFile::Open(path);
  if (!file.ok())
    return absl::Status(file.status().code(), Str("--data ", file.status().message()));
  Reader reader(checkpoint, *tokenizer, options);
  Examples read;
  TREADLE_ASSIGN_OR_RETURN(read.sum, (*file)->Sum());
  std::string_view rest = (*file)->text();
  for (int64_t number = 1; !rest.empty(); ++number) {
    const std::string_view text = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), text.size() + 1));
    if (text.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string place = Str(path, ":", number);
    TREADLE_ASSIGN_OR_RETURN(const Json line, ParseJsonObject(text, place));
    auto example = reader.Read(line);
    if (!example.ok()) return InvalidArgument(place, ": ", example.status().message());
    const auto most = static_cast<size_t>(options.max_length);
    read.cut += example->tokens.size() > most ? 1 : 0;
    if (example->tokens.size() > most) {
      example->tokens.resize(most);
      example->counts.resize(most);
    }
    if (example->tokens.empty() || example->Counted() == 0) {
      return InvalidArgument(place, ": no token to learn within --max-length ", most);
    }
    read.examples.push_back(*std::move(example));
  }
  TREADLE_RETURN_IF_ERROR((*file)->CheckUnchanged());
  if (read.examples.empty()) return InvalidArgument("--data ", path, ": has no lines");
  return read;
}

}  // namespace treadle
