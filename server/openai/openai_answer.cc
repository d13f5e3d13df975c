#include "server/openai/openai_answer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "base/status.h"
#include "server/openai/json/json_text.h"

namespace treadle {
namespace {

// Adds to the inside of an array.
void Append(std::string& array, std::string_view element) {
  if (!array.empty()) array += ',';
  array += element;
}

// Characters, counting what is no UTF-8 as what it is shown as, or nearly.
int64_t Characters(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; });
}

// A call in a message; a stream tells it in two pieces, with its index.
std::string CallText(const ToolCall& call, const std::string& arguments) {
  return Str(R"("id":)", JsonString(call.id), R"(,"type":"function","function":{"name":)",
             JsonString(call.name), R"(,"arguments":)", arguments, "}");
}

// In base64: the bytes of f32 numbers, little-endian, as OpenAI's client reads them.
std::string EmbeddingText(const std::vector<float>& embedding, bool base64) {
  if (!base64) return JsonFloats(embedding);
  const auto* const bytes = reinterpret_cast<const char*>(embedding.data());
  return '"' + absl::Base64Escape({bytes, embedding.size() * sizeof(float)}) + '"';
}

}  // namespace

OpenAiAnswer::OpenAiAnswer(const ServedModel& model, const OpenAiRequest& request, std::string id,
                           int64_t created)
    : model_(model),
      embedding_(request.common.embedding),
      base64_(request.base64),
      chat_(request.chat),
      stream_(request.stream),
      echo_(request.echo),
      prompt_only_(request.prompt_only),
      token_ids_(request.token_ids),
      logprobs_(request.common.logprobs.has_value()),
      prompt_logprobs_(request.prompt_logprobs),
      include_usage_(request.include_usage),
      usage_in_chunks_(request.usage_in_chunks),
      candidates_(static_cast<size_t>(std::max(request.common.sampling.num_candidates, 1))),
      id_(std::move(id)),
      reading_(request.reading),
      include_reasoning_(request.include_reasoning),
      head_(Str(R"({"id":)", JsonString(id_), R"(,"object":")",
                !chat_    ? "text_completion"
                : stream_ ? "chat.completion.chunk"
                          : "chat.completion",
                R"(","created":)", created, R"(,"model":)",
                JsonString(model.NameFor(request.common.adapter)), R"(,"system_fingerprint":)",
                JsonString(model.fingerprint), R"(,"choices":[)")),
      prompts_(request.prompts.size()) {
  if (!echo_) return;
  for (const OpenAiRequest::Prompt& prompt : request.prompts) {
    const auto* const text = std::get_if<std::string>(&prompt);
    texts_.push_back(text == nullptr ? std::nullopt : std::optional(*text));
  }
}

std::string OpenAiAnswer::Event(const std::string& data) {
  if (++events_ <= skipped_) return "";
  return Str(numbered_ ? Str("id: ", id_, ":", events_, "\n") : "", "data: ", data, "\n\n");
}

// A token's bytes; by number where the model has no tokenizer.
std::string OpenAiAnswer::TokenText(int32_t token) const {
  return model_.tokenizer ? model_.tokenizer->TokenBytes(token, /*special=*/true)
                          : Str("token_id:", token);
}

bool OpenAiAnswer::Add(size_t prompt, const SessionEvent& event) {
  // The door has seen to the number of candidates by now.
  if (choices_.empty()) {
    choices_.resize(prompts_.size() * candidates_);
    for (Choice& choice : choices_) {
      if (reading_.tools != nullptr || reading_.reasoning != nullptr) {
        choice.reader.emplace(reading_);
      }
    }
  }
  if (event.prompt != nullptr) AddPrompt(prompt, *event.prompt);
  if (event.end != nullptr) {
    draft_tokens_ += event.end->timings.draft_tokens;
    accepted_draft_tokens_ += event.end->timings.accepted_draft_tokens;
  }
  return event.output != nullptr &&
         AddOutput(choices_[prompt * candidates_ + event.output->candidate], *event.output);
}

void OpenAiAnswer::AddPrompt(size_t index, const SessionEvent::Prompt& event) {
  if (event.request.adapter != 0 && index == 0) {
    const std::string plain = JsonString(model_.fingerprint);
    const std::string adapted = Str(model_.fingerprint, "-", std::hex, event.request.adapter);
    head_.replace(head_.rfind(plain), plain.size(), JsonString(adapted));
  }
  const std::vector<int32_t>& ids = event.request.prompt;
  const std::vector<TokenDetail>& details = event.details;
  prompt_tokens_ += static_cast<int64_t>(ids.size());
  cached_tokens_ += event.cached_tokens;
  Prompt& prompt = prompts_[index];
  if (token_ids_) prompt.ids = JsonIds(ids);
  if (prompt_logprobs_) {
    prompt.logprobs = "null";  // of the first token
    for (size_t i = 0; i < details.size() && i + 1 < ids.size(); ++i) {
      std::string entry;
      const auto add = [&](int32_t token, float logprob, const std::string& rank) {
        Append(entry, Str('"', token, R"(":{"logprob":)", JsonLogprob(logprob), R"(,"rank":)", rank,
                          R"(,"decoded_token":)", JsonString(TokenText(token)), "}"));
      };
      bool is_top = false;
      for (size_t rank = 0; rank < details[i].top.size(); ++rank) {
        const TokenLogprob& top = details[i].top[rank];
        add(top.token, top.logprob, std::to_string(rank + 1));
        is_top |= top.token == ids[i + 1];
      }
      if (!is_top) add(ids[i + 1], details[i].logprob, "null");
      prompt.logprobs += ",{" + entry + "}";
    }
  }
  if (!echo_) return;
  Choice echoed;
  echoed.text = texts_[index]      ? *std::move(texts_[index])
                : model_.tokenizer ? model_.tokenizer->Decode(ids, /*special=*/true)
                                   : "";
  echoed.news = true;
  for (size_t i = 0; logprobs_ && i < ids.size(); ++i) {
    AddLogprob(echoed, ids[i], i > 0 && i <= details.size() ? &details[i - 1] : nullptr);
  }
  std::fill_n(choices_.begin() + static_cast<ptrdiff_t>(index * candidates_), candidates_, echoed);
}

bool OpenAiAnswer::AddOutput(Choice& choice, const OutputPart& part) {
  if (choice.ended) return false;
  choice.news = true;
  if (embedding_) {
    choice.text = EmbeddingText(part.embedding, base64_);
    return false;
  }
  if (prompt_only_) {
    choice.finish = "length";
    return false;
  }
  // A token at a time, since each is counted as what it says.
  size_t told = 0;
  for (size_t i = 0; i < part.token_ids.size() && !choice.ended; ++i) {
    ++completion_tokens_;
    if (choice.reader) {
      choice.reader->BeginToken();
      const size_t end = i < part.ends.size() ? part.ends[i] : part.text.size();
      AddText(choice, choice.reader->Push(part.text.substr(told, end - told)));
      told = end;
      choice.ended = !reading_.parallel && !choice.calls.empty();
    }
    if (i < part.details.size()) AddLogprob(choice, part.token_ids[i], &part.details[i]);
    if (token_ids_) Append(choice.ids, std::to_string(part.token_ids[i]));
  }
  if (choice.ended) {
    choice.finish = "tool_calls";
    return part.finish == FinishReason::kNone;
  }
  if (!choice.reader) {
    choice.text += part.text;
  } else if (told < part.text.size()) {
    AddText(choice, choice.reader->Push(part.text.substr(told)));
  }
  if (part.finish == FinishReason::kNone) return false;
  if (choice.reader) AddText(choice, choice.reader->Finish());
  choice.finish = part.finish == FinishReason::kLength ? "length"
                  : choice.calls.empty()               ? "stop"
                                                       : "tool_calls";
  if (part.finish == FinishReason::kStopString) choice.stop_reason = JsonString(part.stop_string);
  if (part.finish == FinishReason::kEndToken &&
      std::ranges::count(model_.end_ids, part.stop_token) == 0) {
    choice.stop_reason = std::to_string(part.stop_token);
  }
  return false;
}

void OpenAiAnswer::AddText(Choice& choice, AnswerText text) {
  choice.text += text.content;
  if (include_reasoning_) choice.reasoning += text.reasoning;
  for (ToolCall& call : text.calls) {
    if (call.id.empty()) call.id = reading_.tools->CallId(id_, calls_);
    ++calls_;
    choice.calls.push_back(std::move(call));
  }
}

// As members of a message, or of a delta: DeepSeek's name for it, and vLLM's. Empty: there is none.
std::string OpenAiAnswer::ReasoningOf(const Choice& choice) const {
  if (choice.reasoning.empty()) return "";
  const std::string text = JsonString(choice.reasoning);
  return Str(R"("reasoning_content":)", text, R"(,"reasoning":)", text);
}

// `detail`: null for the first token of a prompt, which nothing foretells.
void OpenAiAnswer::AddLogprob(Choice& choice, int32_t token, const TokenDetail* detail) const {
  const std::string text = TokenText(token);
  if (chat_) {
    const auto entry = [](const std::string& bytes, float logprob) {
      std::vector<int32_t> numbers;
      for (const char c : bytes) numbers.push_back(static_cast<unsigned char>(c));
      return Str(R"({"token":)", JsonString(bytes), R"(,"logprob":)", JsonLogprob(logprob),
                 R"(,"bytes":)", JsonIds(numbers));
    };
    std::string tops;
    for (const TokenLogprob& top : detail->top) {
      Append(tops, entry(TokenText(top.token), top.logprob) + "}");
    }
    Append(choice.tokens, entry(text, detail->logprob) + R"(,"top_logprobs":[)" + tops + "]}");
    return;
  }
  const std::string key = JsonString(text);
  Append(choice.tokens, key);
  Append(choice.offsets, std::to_string(choice.offset));
  choice.offset += Characters(text);
  if (detail == nullptr) {
    Append(choice.logprobs, "null");
    Append(choice.tops, "null");
    return;
  }
  Append(choice.logprobs, JsonLogprob(detail->logprob));
  // By text, of which several tokens may have the same: the best of them counts.
  std::vector<std::string> keys;
  std::string tops;
  const auto add = [&](std::string name, float logprob) {
    if (std::ranges::count(keys, name) > 0) return;
    Append(tops, name + ":" + JsonLogprob(logprob));
    keys.push_back(std::move(name));
  };
  for (const TokenLogprob& top : detail->top) add(JsonString(TokenText(top.token)), top.logprob);
  add(key, detail->logprob);
  Append(choice.tops, "{" + tops + "}");
}

std::string OpenAiAnswer::LogprobsOf(const Choice& choice) const {
  if (!logprobs_) return "null";
  if (chat_) return Str(R"({"content":[)", choice.tokens, R"(],"refusal":null})");
  return Str(R"({"tokens":[)", choice.tokens, R"(],"token_logprobs":[)", choice.logprobs,
             R"(],"top_logprobs":[)", choice.tops, R"(],"text_offset":[)", choice.offsets, "]}");
}

// The fields of a choice's prompt that vLLM's users know.
std::string OpenAiAnswer::PromptOf(size_t index) const {
  const Prompt& prompt = prompts_[index / candidates_];
  return (token_ids_ ? R"(,"prompt_token_ids":)" + prompt.ids : "") +
         (prompt_logprobs_ ? R"(,"prompt_logprobs":[)" + prompt.logprobs + "]" : "");
}

std::string OpenAiAnswer::Usage() const {
  std::string details;
  if (reading_.reasoning != nullptr) {
    int64_t reasoning = 0;
    for (const Choice& choice : choices_) {
      reasoning += choice.reader ? choice.reader->reasoning_tokens() : 0;
    }
    details = Str(R"("reasoning_tokens":)", reasoning);
  }
  if (draft_tokens_ > 0) {  // OpenAI's names for guesses that clients send
    Append(details,
           Str(R"("accepted_prediction_tokens":)", accepted_draft_tokens_,
               R"(,"rejected_prediction_tokens":)", draft_tokens_ - accepted_draft_tokens_));
  }
  return Str(R"({"prompt_tokens":)", prompt_tokens_, R"(,"completion_tokens":)", completion_tokens_,
             R"(,"total_tokens":)", prompt_tokens_ + completion_tokens_,
             R"(,"prompt_tokens_details":{"cached_tokens":)", cached_tokens_, "}",
             details.empty() ? "" : R"(,"completion_tokens_details":{)" + details + "}", "}");
}

// A chunk of a stream. `content`: the members of a choice that say what is new.
std::string OpenAiAnswer::Chunk(size_t index, const std::string& content,
                                const std::string& logprobs, const std::string& ids, bool finish) {
  const Choice& choice = choices_[index];
  std::string chunk = Str(head_, R"({"index":)", index, ",", content, R"(,"logprobs":)", logprobs,
                          R"(,"finish_reason":)");
  chunk += finish ? Str('"', choice.finish, R"(","stop_reason":)", choice.stop_reason) : "null";
  if (token_ids_) chunk += R"(,"token_ids":[)" + ids + "]";
  if (!chat_) chunk += (choice.begun ? "" : PromptOf(index));
  chunk += "}]";
  if (chat_) chunk += (choice.begun ? "" : PromptOf(index));
  if (usage_in_chunks_) {
    chunk += R"(,"usage":)" + Usage();
  } else if (include_usage_) {
    chunk += R"(,"usage":null)";
  }
  return Event(chunk + "}");
}

std::string OpenAiAnswer::TakeEvents() {
  std::string events;
  for (size_t index = 0; index < choices_.size(); ++index) {
    Choice& choice = choices_[index];
    if (!std::exchange(choice.news, false)) continue;
    const auto content = [&] {
      if (!chat_) return R"("text":)" + JsonString(choice.text);
      std::string members = ReasoningOf(choice);
      if (members.empty() || !choice.text.empty()) {
        Append(members, R"("content":)" + JsonString(choice.text));
      }
      return R"("delta":{)" + members + "}";
    };
    if (chat_ && !choice.begun) {
      events += Chunk(index, R"("delta":{"role":"assistant","content":""})", "null", "", false);
      choice.begun = true;
    }
    if (!choice.text.empty() || !choice.reasoning.empty() || !choice.tokens.empty() ||
        !choice.ids.empty()) {
      events += Chunk(index, content(), LogprobsOf(choice), choice.ids, false);
      choice.begun = true;
    }
    for (; choice.told_calls < choice.calls.size(); ++choice.told_calls) {
      const ToolCall& call = choice.calls[choice.told_calls];
      const std::string arguments =
          R"("function":{"arguments":)" + JsonString(call.arguments) + "}";
      for (const std::string& piece : {CallText(call, R"("")"), arguments}) {
        events += Chunk(
            index, Str(R"("delta":{"tool_calls":[{"index":)", choice.told_calls, ",", piece, "}]}"),
            "null", "", false);
      }
    }
    if (!choice.finish.empty()) {
      events += Chunk(index, chat_ ? R"("delta":{})" : R"("text":"")", "null", "", true);
    }
    choice.text.clear();
    choice.reasoning.clear();
    choice.ids.clear();
    for (std::string* array : {&choice.tokens, &choice.logprobs, &choice.tops, &choice.offsets}) {
      array->clear();
    }
  }
  return events;
}

std::string OpenAiAnswer::LastEvents() {
  std::string events =
      include_usage_ ? Event(head_ + R"(],"usage":)" + Usage() + "}") : std::string();
  return events += Event("[DONE]");
}

std::string OpenAiAnswer::Embeddings() const {
  std::string data;
  for (size_t index = 0; index < choices_.size(); ++index) {
    Append(data, Str(R"({"object":"embedding","index":)", index, R"(,"embedding":)",
                     choices_[index].text, "}"));
  }
  return Str(R"({"object":"list","data":[)", data, R"(],"model":)", JsonString(model_.name),
             R"(,"usage":{"prompt_tokens":)", prompt_tokens_, R"(,"total_tokens":)", prompt_tokens_,
             "}}");
}

std::string OpenAiAnswer::Whole() const {
  if (embedding_) return Embeddings();
  std::string answer = head_;
  for (size_t index = 0; index < choices_.size(); ++index) {
    const Choice& choice = choices_[index];
    const bool silent = !choice.calls.empty() || !choice.reasoning.empty();
    std::string text = choice.text.empty() && silent ? "null" : JsonString(choice.text);
    if (!choice.reasoning.empty()) text += "," + ReasoningOf(choice);
    if (!choice.calls.empty()) {
      std::string calls;
      for (const ToolCall& call : choice.calls) {
        Append(calls, "{" + CallText(call, JsonString(call.arguments)) + "}");
      }
      text += R"(,"tool_calls":[)" + calls + "]";
    }
    if (index > 0) answer += ',';
    answer +=
        Str(R"({"index":)", index,
            chat_ ? R"(,"message":{"role":"assistant","content":)" : R"(,"text":)", text,
            chat_ ? R"(,"refusal":null})" : "", R"(,"logprobs":)", LogprobsOf(choice),
            R"(,"finish_reason":")", choice.finish, R"(","stop_reason":)", choice.stop_reason);
    if (token_ids_) answer += R"(,"token_ids":[)" + choice.ids + "]";
    if (!chat_) answer += PromptOf(index);
    answer += "}";
  }
  answer += "]";
  if (chat_) answer += PromptOf(0);
  return answer + R"(,"usage":)" + Usage() + "}";
}

}  // namespace treadle
