// Calls of tools in answers: the first byte says of which format, then come pieces, each up to a
// zero. However an answer was cut, the same text and calls come out, and the calls are what they
// must be for a client.
#include "server/openai/tools/tool_calls.h"

#include <iterator>

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
  constexpr const char* kTemplates[] = {
      R"(<tool_call> {"name": ")", R"({"name": "f", "parameters": {}})",   "<function= <parameter=",
      "<arg_key> <arg_value>",     "<｜tool▁call▁begin｜> <｜tool▁sep｜>", "[TOOL_CALLS]",
      "<|tool_call> call:",        "<start_function_call> call:"};
  const size_t choice = input.Choose(2 * std::size(kTemplates));
  const bool parallel = choice < std::size(kTemplates);
  const ToolFormat* const format = FindToolFormat(kTemplates[choice % std::size(kTemplates)]);
  TREADLE_CHECK(format != nullptr);
  ToolCallReader in_pieces(*format, parallel), at_once(*format, parallel);
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
  TREADLE_CHECK(parallel || whole.calls.size() <= 1);
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
      "\x8<tool_call>{\"name\": 1}</tool_call><tool_call>{\"name\": \"f\", \"parameters\": {}}"
      "<tool_call>{\"name\": \"f\", \"parameters\": {}}"s,
      "\1 <|python_\0tag|>{\"name\": \"f\", \"parameters\": {\"x\": null}}; {\"name\": \"g\","
      "\"parameters\": {}} and more"s,
      "\1<|python_tag|>{\"name\": \"f\"}; {\"name\": \"g\", \"name\": \"f\", \"arguments\": \"{}\"}"s,
      "\2<tool_call>\n<function=f>\n<param\0eter=a>\n1\n</parameter>\n</function>\n</tool_call>"s,
      "\3<tool_call>f\n<arg_key>a</arg_key>\n<arg_va\0lue>x</arg_value>\n</tool_call>"s,
      "\4<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n"
      "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"s,
      "\5[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}]"s,
      "\5[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g{}"s,
      "\6<|tool_call>call:f{a:<|\"|>b<|\"|>,c:[1,{}]}<tool_call|>"s,
      "\7<start_function_call>call:f{a:<escape>b<escape>}<end_function_call>"s,
      "\x9{\"answer\": 42} {\"name\": \"f\", \"parameters\": {}}"s};
}

}  // namespace

const FuzzTarget kToolCallsTarget = {"tool_calls", 2048, Seeds, Run};

}  // namespace treadle
