#include "server/responses/responses_answer.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/status.h"
#include "server/openai/json/json_text.h"
#include "server/openai/openai_call.h"

namespace treadle {
ResponsesAnswer::ResponsesAnswer(const ServedModel& model, const ResponsesRequest& request,
                                 std::string id, int64_t created, std::string owner,
                                 std::shared_ptr<ResponseStore> store)
    : BlockAnswer(request),
      name_(model.NameFor(request.common.adapter)),
      id_(std::move(id)),
      owner_(std::move(owner)),
      created_(created),
      echo_(request.echo),
      history_(request.store ? request.history : std::vector<ChatMessage>()),
      store_(request.store ? std::move(store) : nullptr) {}

// The id of an item. A call's is the item's, behind what begins it.
std::string ResponsesAnswer::NewBlockId(Kind kind, const std::string& call) const {
  constexpr const char* kPrefixes[] = {"rs_", "msg_", "fc_"};  // by Kind
  const char* const prefix = kPrefixes[static_cast<size_t>(kind)];
  return kind == Kind::kCall ? prefix + call : NewId(prefix);
}

std::string ResponsesAnswer::Event(std::string_view type, const std::string& members) {
  return Str("event: ", type, "\ndata: {\"type\":\"", type, R"(","sequence_number":)", events_++,
             members, "}\n\n");
}

std::string ResponsesAnswer::ItemEvent(std::string_view type, const Block& block,
                                       const std::string& item) {
  return Event(type, Str(R"(,"output_index":)", block.index, R"(,"item":)", item));
}

std::string ResponsesAnswer::PartEvent(std::string_view type, const Block& block,
                                       const std::string& members) {
  return Event(type, Str(R"(,"item_id":)", JsonString(block.id), R"(,"output_index":)", block.index,
                         block.kind == Kind::kCall ? "" : R"(,"content_index":0)", members));
}

std::string ResponsesAnswer::Part(const Block& block, const std::string& text) {
  return Str(block.kind == Kind::kReasoning
                 ? R"({"type":"reasoning_text","text":)"
                 : R"({"type":"output_text","annotations":[],"logprobs":[],"text":)",
             JsonString(text), "}");
}

std::string ResponsesAnswer::Item(const Block& block, bool begun) const {
  const bool cut_off = block.index + 1 == blocks().size() && block.kind != Kind::kCall &&
                       finish() == FinishReason::kLength;
  const std::string head = Str(R"({"id":)", JsonString(block.id), R"(,"status":")",
                               begun     ? "in_progress"
                               : cut_off ? "incomplete"
                                         : "completed",
                               R"(","type":)");
  if (block.kind == Kind::kCall) {
    return Str(head, R"("function_call","call_id":)", JsonString(CallId(block)), R"(,"name":)",
               JsonString(block.called), R"(,"arguments":)", JsonString(begun ? "" : block.text),
               "}");
  }
  return Str(head,
             block.kind == Kind::kReasoning ? R"("reasoning","summary":[])"
                                            : R"("message","role":"assistant")",
             R"(,"content":[)", begun ? "" : Part(block, block.text), "]}");
}

std::string ResponsesAnswer::Usage() const {
  return Str(R"({"input_tokens":)", prompt_tokens(), R"(,"input_tokens_details":{"cached_tokens":)",
             cached_tokens(), R"(,"cache_write_tokens":0},"output_tokens":)", completion_tokens(),
             R"(,"output_tokens_details":{"reasoning_tokens":)", reasoning_tokens(),
             R"(},"total_tokens":)", prompt_tokens() + completion_tokens(), "}");
}

std::string ResponsesAnswer::Response(const char* status, const std::string& output) const {
  const bool over = finish() != FinishReason::kNone;
  return Str(R"({"id":")", id_, R"(","object":"response","created_at":)", created_,
             R"(,"status":")", status, R"(","error":null,"incomplete_details":)",
             finish() == FinishReason::kLength ? R"({"reason":"max_output_tokens"})" : "null",
             R"(,"model":)", JsonString(name_), R"(,"output":[)", output, "],", echo_,
             R"(,"usage":)", over ? Usage() : "null", "}");
}

std::string ResponsesAnswer::Whole() const {
  std::string output;
  for (const Block& block : blocks()) {
    output += (block.index > 0 ? "," : "") + Item(block, /*begun=*/false);
  }
  return Response(finish() == FinishReason::kLength ? "incomplete" : "completed", output);
}

std::string ResponsesAnswer::Begin() {
  const std::string response = R"(,"response":)" + Response("in_progress", "");
  std::string events = Event("response.created", response);
  return events += Event("response.in_progress", response);
}

std::string ResponsesAnswer::BeginBlock(const Block& block) {
  std::string events = ItemEvent("response.output_item.added", block, Item(block, /*begun=*/true));
  if (block.kind == Kind::kCall) return events;
  return events += PartEvent("response.content_part.added", block, R"(,"part":)" + Part(block, ""));
}

// By Kind: what begins the types of a block's events, what its whole text is called, and what an
// event of text has besides.
struct ResponsesAnswer::KindNames {
  std::string_view type, whole;
  const char* more;
};
const ResponsesAnswer::KindNames& ResponsesAnswer::NamesOf(const Block& block) {
  static constexpr KindNames kNames[] = {
      {"response.reasoning_text", "text", ""},
      {"response.output_text", "text", R"(,"logprobs":[])"},
      {"response.function_call_arguments", "arguments", ""},
  };
  return kNames[static_cast<size_t>(block.kind)];
}

std::string ResponsesAnswer::GrowBlock(const Block& block, std::string_view text) {
  const KindNames& names = NamesOf(block);
  return PartEvent(Str(names.type, ".delta"), block,
                   Str(R"(,"delta":)", JsonString(text), names.more));
}

std::string ResponsesAnswer::EndBlock(const Block& block) {
  const KindNames& names = NamesOf(block);
  const bool call = block.kind == Kind::kCall;
  std::string events = PartEvent(Str(names.type, ".done"), block,
                                 Str(call ? R"(,"name":)" + JsonString(block.called) : "", ",\"",
                                     names.whole, "\":", JsonString(block.text), names.more));
  if (!call) {
    events +=
        PartEvent("response.content_part.done", block, R"(,"part":)" + Part(block, block.text));
  }
  return events += ItemEvent("response.output_item.done", block, Item(block, /*begun=*/false));
}

std::string ResponsesAnswer::End() {
  const std::string whole = Whole();
  if (store_ != nullptr) {
    KeptResponse kept{.id = id_, .owner = owner_, .body = whole, .messages = history_};
    ChatMessage answer{.role = "assistant", .content = {}};
    for (const Block& block : blocks()) {
      if (block.kind == Kind::kCall) {
        answer.tool_calls.push_back({CallId(block), block.called, block.text});
      } else if (block.kind == Kind::kReasoning) {
        answer.reasoning += block.text;
      } else {
        answer.content = answer.content ? *answer.content + "\n" + block.text : block.text;
      }
    }
    if (!answer.content && answer.tool_calls.empty()) answer.content = "";
    kept.messages.push_back(std::move(answer));
    kept.kept_at = Clock::now();
    store_->Keep(std::move(kept));
  }
  return Event(finish() == FinishReason::kLength ? "response.incomplete" : "response.completed",
               R"(,"response":)" + whole);
}

std::string ResponsesAnswer::ErrorEvent(const HttpResponse& error) {
  const nlohmann::json told = nlohmann::json::parse(error.body)["error"];
  return Event("error", Str(R"(,"code":)", told["code"].dump(), R"(,"message":)",
                            told["message"].dump(), R"(,"param":)", told["param"].dump()));
}

}  // namespace treadle
