// From the answer in the making to the API's messages. Pure functions.
#pragma once

#include <vector>

#include "scheduler/ledger.h"
#include "scheduler/request.h"
#include "server/session/generation.h"

namespace treadle::v1 {
class GenerateResponse;
class LedgerRecord;
class Output;
class PromptInfo;
}  // namespace treadle::v1

namespace treadle {

// What the first message says. `details`: of prompt tokens 1.., if they were asked.
void FillPromptInfo(const RequestSpec& spec, const std::vector<TokenDetail>& details,
                    v1::PromptInfo& info);

// Appends: text and ids are added to what `output` holds.
void AppendOutput(const OutputPart& part, v1::Output& output);

// Usage and timing: the last message.
void FillEnd(int32_t prompt_tokens, int32_t completion_tokens, const RequestTimings& timings,
             v1::GenerateResponse& response);

void FillLedgerRecord(const LedgerRecord& record, uint64_t lost, v1::LedgerRecord& message);

}  // namespace treadle
