// Calls of tools in answers: the first byte says of which format, then come pieces, each up to a
// zero. However an answer was cut, the same text and calls come out, and the calls are what they
// must be for a client.
#include "server/openai/tool_calls.h"

#include "base/json_file.h"
#include "base/status.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace treadle {
namespace {

void Add(ToolText more, ToolText& to) {
  to.content += more.content;
  to.calls.insert(to.calls.end(), more.calls.begin(), more.calls.end());
}

void Run(std::string_view bytes) {
  FuzzInput input(bytes);
  const size_t choice = input.Choose(4);
  const ToolFormat* const format = FindToolFormat(
      choice % 2 == 0 ? R"(<tool_call> {"name": ")" : R"({"name": "f", "parameters": {}})");
  TREADLE_CHECK(format != nullptr);
  ToolCallReader in_pieces(*format, choice < 2), at_once(*format, choice < 2);
  ToolText pieces, whole;
  std::string answer;
  while (!input.empty()) {
    const std::string_view part = input.Part();
    answer += part;
    Add(in_pieces.Push(part), pieces);
  }
  Add(in_pieces.Finish(), pieces);
  Add(at_once.Push(answer), whole);
  Add(at_once.Finish(), whole);
  TREADLE_CHECK(pieces.content == whole.content && pieces.calls.size() == whole.calls.size());
  TREADLE_CHECK(whole.content.size() <= answer.size());
  TREADLE_CHECK(choice < 2 || whole.calls.size() <= 1);
  for (size_t i = 0; i < whole.calls.size(); ++i) {
    const ToolCall &call = whole.calls[i], &other = pieces.calls[i];
    TREADLE_CHECK(call.name == other.name && call.arguments == other.arguments);
    TREADLE_CHECK(ParseJsonObject(call.arguments, "").ok());
  }
}

std::vector<std::string> Seeds() {
  using namespace std::string_literals;
  return {
      "\0Let me see.\n<tool_call>\n{\"name\": \"f\", \"arg\0uments\": {\"a\": [1, \"}\\\"\"]}}\n"
      "</tool_\0call>\n<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call> Done."s,
      "\2<tool_call>{\"name\": 1}</tool_call><tool_call>{\"name\": \"f\", \"parameters\": {}}"
      "<tool_call>{\"name\": \"f\", \"parameters\": {}}"s,
      "\1 <|python_\0tag|>{\"name\": \"f\", \"parameters\": {\"x\": null}}; {\"name\": \"g\","
      "\"parameters\": {}} and more"s,
      "\1<|python_tag|>{\"name\": \"f\"}; {\"name\": \"g\", \"name\": \"f\", \"arguments\": \"{}\"}"s,
      "\3{\"answer\": 42} {\"name\": \"f\", \"parameters\": {}}"s};
}

}  // namespace

const FuzzTarget kToolCallsTarget = {"tool_calls", 2048, Seeds, Run};

}  // namespace treadle
