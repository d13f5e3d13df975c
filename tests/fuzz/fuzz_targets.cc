#include <array>

#include "tests/fuzz/fuzz_target.h"

namespace treadle {

std::span<const FuzzTarget* const> FuzzTargets() {
  static const std::array kTargets = {&kRequestsTarget,      &kHttp2GuardTarget,
                                      &kChatTemplateTarget,  &kPlanMessagesTarget,
                                      &kControlWorkerTarget, &kControlMasterTarget,
                                      &kGgufTarget,          &kSafetensorsTarget,
                                      &kConfigJsonTarget,    &kTokenizerJsonTarget,
                                      &kVocabularyTarget,    &kPreTokenizerTarget,
                                      &kToolCallsTarget,     &kActivationMessagesTarget,
                                      &kHttpRequestsTarget,  &kOperatorFilesTarget,
                                      &kTracesTarget,        &kRecordingTarget,
                                      &kHttpResponsesTarget, &kTiktokenFileTarget};
  return kTargets;
}

}  // namespace treadle
