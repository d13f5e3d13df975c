#include "server/responses/responses_answer.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/status.h"
#include "server/openai/json_text.h"
#include "server/openai/openai_call.h"

namespace treadle {
namespace {

std::string OutputText(const std::string& text) {
  return Str(R"({"type":"output_text","annotations":[],"logprobs":[],"text":)", JsonString(text),
             "}");
}

}  // namespace

ResponsesAnswer::ResponsesAnswer(const ServedModel& model, const ResponsesRequest& request,
                                 std::string id, int64_t created, std::string owner,
                                 std::shared_ptr<ResponseStore> store)
    : BlockAnswer(request),
      model_(model),
      id_(std::move(id)),
      owner_(std::move(owner)),
      created_(created),
      echo_(request.echo),
      history_(request.store ? request.history : std::vector<ChatMessage>()),
      store_(request.store ? std::move(store) : nullptr) {}

// The rest of an item's id, and of a call's.
std::string ResponsesAnswer::NewBlockId(bool /*call*/) const { return NewId(""); }

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
  return Event(
      type, Str(R"(,"item_id":")", block.called ? "fc_" : "msg_", block.id, R"(","output_index":)",
                block.index, block.called ? "" : R"(,"content_index":0)", members));
}

std::string ResponsesAnswer::Item(const Block& block, bool begun) const {
  const bool cut_off =
      block.index + 1 == blocks().size() && !block.called && finish() == FinishReason::kLength;
  const char* const status = begun ? "in_progress" : cut_off ? "incomplete" : "completed";
  if (!block.called) {
    return Str(R"({"id":"msg_)", block.id, R"(","type":"message","status":")", status,
               R"(","role":"assistant","content":[)", begun ? "" : OutputText(block.text), "]}");
  }
  return Str(R"({"id":"fc_)", block.id, R"(","type":"function_call","status":")", status,
             R"(","call_id":"call_)", block.id, R"(","name":)", JsonString(*block.called),
             R"(,"arguments":)", JsonString(begun ? "" : block.text), "}");
}

std::string ResponsesAnswer::Usage() const {
  return Str(R"({"input_tokens":)", prompt_tokens(), R"(,"input_tokens_details":{"cached_tokens":)",
             cached_tokens(), R"(,"cache_write_tokens":0},"output_tokens":)", completion_tokens(),
             R"(,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":)",
             prompt_tokens() + completion_tokens(), "}");
}

std::string ResponsesAnswer::Response(const char* status, const std::string& output) const {
  const bool over = finish() != FinishReason::kNone;
  return Str(R"({"id":")", id_, R"(","object":"response","created_at":)", created_,
             R"(,"status":")", status, R"(","error":null,"incomplete_details":)",
             finish() == FinishReason::kLength ? R"({"reason":"max_output_tokens"})" : "null",
             R"(,"model":)", JsonString(model_.name), R"(,"output":[)", output, "],", echo_,
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
  if (!block.called) {
    events += PartEvent("response.content_part.added", block, R"(,"part":)" + OutputText(""));
  }
  return events;
}

std::string ResponsesAnswer::GrowBlock(const Block& block, std::string_view text) {
  const std::string delta = R"(,"delta":)" + JsonString(text);
  return block.called ? PartEvent("response.function_call_arguments.delta", block, delta)
                      : PartEvent("response.output_text.delta", block, delta + R"(,"logprobs":[])");
}

std::string ResponsesAnswer::EndBlock(const Block& block) {
  std::string events;
  if (block.called) {
    events = PartEvent(
        "response.function_call_arguments.done", block,
        Str(R"(,"name":)", JsonString(*block.called), R"(,"arguments":)", JsonString(block.text)));
  } else {
    events = PartEvent("response.output_text.done", block,
                       Str(R"(,"text":)", JsonString(block.text), R"(,"logprobs":[])"));
    events +=
        PartEvent("response.content_part.done", block, R"(,"part":)" + OutputText(block.text));
  }
  return events + ItemEvent("response.output_item.done", block, Item(block, /*begun=*/false));
}

std::string ResponsesAnswer::End() {
  const std::string whole = Whole();
  if (store_ != nullptr) {
    KeptResponse kept{.id = id_, .owner = owner_, .body = whole, .messages = history_};
    ChatMessage answer{.role = "assistant"};
    for (const Block& block : blocks()) {
      if (block.called) {
        answer.tool_calls.push_back({"call_" + block.id, *block.called, block.text});
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
