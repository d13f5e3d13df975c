// Parsers of bytes from outside, as functions that any bytes may be given to. libFuzzer looks for
// bytes that break one (`make fuzz`); the ordinary suite runs all of them on their seeds.
//
// Thread safety: one target at a time, on one thread.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace treadle {

struct FuzzTarget {
  std::string_view name;
  // The length of an input. Longer ones find nothing new, slowly.
  size_t max_bytes;
  // Inputs that go deep, to start from; not empty.
  std::vector<std::string> (*seeds)();
  // Returns, whatever the bytes are. What must hold is a TREADLE_CHECK.
  void (*run)(std::string_view input);
};

// Each in the source of its name.
extern const FuzzTarget kActivationMessagesTarget, kChatTemplateTarget, kConfigJsonTarget,
    kControlMasterTarget, kControlWorkerTarget, kGgufTarget, kHttp2GuardTarget, kHttpRequestsTarget,
    kHttpResponsesTarget, kOperatorFilesTarget, kPlanMessagesTarget, kPreTokenizerTarget,
    kRecordingTarget, kRequestsTarget, kSafetensorsTarget, kTokenizerJsonTarget, kToolCallsTarget,
    kTiktokenFileTarget, kTracesTarget, kVocabularyTarget;

// All of them.
std::span<const FuzzTarget* const> FuzzTargets();

}  // namespace treadle
