// Recorded traces of requests, and lengths as they stand on the command line: the input is the
// file, or behind a first byte of zero the length.
#include <cmath>

#include "base/status.h"
#include "bench/load/trace_file.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/checkpoint_files.h"

namespace treadle {
namespace {

void Run(std::string_view bytes) {
  if (bytes.starts_with('\0')) {
    const auto range = ParseLengthRange(std::string(bytes.substr(1)));
    if (!range.ok()) return;
    TREADLE_CHECK(1 <= range->low && range->low <= range->high);
    const int32_t length = TraceRandom(1).Length(*range);
    TREADLE_CHECK(range->low <= length && length <= range->high);
    return;
  }
  static const ScratchFolder* const folder = new ScratchFolder;
  const auto encode = [](std::string_view text) -> absl::StatusOr<std::vector<int32_t>> {
    return std::vector<int32_t>(text.begin(), text.end());
  };
  const auto trace =
      ReadTrace(folder->Write("trace", bytes), {.time_scale = 0.5, .limit = 100, .encode = encode});
  if (!trace.ok()) return;
  TREADLE_CHECK(!trace->empty() && trace->size() <= 100 && trace->front().arrival == 0);
  double last = 0;
  for (int64_t i = 0; i < std::ssize(*trace); ++i) {
    const TraceEntry& entry = (*trace)[static_cast<size_t>(i)];
    TREADLE_CHECK(entry.input_tokens >= 1 && entry.output_tokens >= 1 && entry.after < i);
    TREADLE_CHECK(std::isfinite(entry.arrival) && entry.arrival >= (entry.after < 0 ? last : 0));
    if (entry.after < 0) last = entry.arrival;
  }
}

std::vector<std::string> Seeds() {
  using namespace std::string_literals;
  return {
      "{\"timestamp\": 0, \"input_length\": 6755, \"output_length\": 500}\n"
      "{\"timestamp\": 3000.5, \"input_length\": 7, \"output_length\": 1}\n"s,
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
      "2023-11-16T18:15:50.9+01:00,396,109\r\n"s,
      "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
      "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"s,
      R"([{"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"},)"
      R"({"from": "human", "value": "d"}, {"from": "gpt", "value": "e"}]}])"s,
      "\0"
      "32:512"s,
      "\0"
      "lognormal:200:100:512"s};
}

}  // namespace

const FuzzTarget kTracesTarget = {"traces", 1024, Seeds, Run};

}  // namespace treadle
