// Between the API's messages and what sessions take and give. Pure functions.
#pragma once

#include <cstdint>

#include "scheduler/ledger.h"
#include "server/access/api_keys.h"
#include "server/session/session.h"

namespace treadle::v1 {
class GenerateRequest;
class GenerateResponse;
class EmbedRequest;
class EmbedResponse;
class LedgerRecord;
class Output;
class Sampling;
}  // namespace treadle::v1

namespace treadle {

// `model`: whose defaults stand for what the message leaves out.
GenerateRequest ToRequest(const v1::GenerateRequest& message, const ServedModel& model);
GenerateRequest ToRequest(const v1::EmbedRequest& message);

// The parameters that have an effect (EffectsOf).
void FillSampling(const SamplingParameters& parameters, v1::Sampling& message);

// Appends: text and ids are added to what `output` holds.
void AppendOutput(const OutputPart& part, v1::Output& output);
// Adds what the event brings to a whole answer.
void Add(const SessionEvent& event, v1::GenerateResponse& response);
void Add(const SessionEvent& event, v1::EmbedResponse& response);
// The beginning and the end, as far as the event has them: prompt_info, usage and timing.
void FillEnds(const SessionEvent& event, v1::GenerateResponse& response);
// A message of GenerateStream.
v1::GenerateResponse ToResponse(const SessionEvent& event);
// A candidate's place in an answer of Generate.
v1::Output& CandidateIn(uint32_t candidate, v1::GenerateResponse& answer);
// Adds a message of GenerateStream to what came before it: at the end, what Generate would answer.
void Append(const v1::GenerateResponse& next, v1::GenerateResponse& answer);

// Clients' request ids are for their owner and for operators: whoever has one can resume or end a
// request. So are names of keys. `reader`: no owner and no operator where no keys are asked for.
void FillLedgerRecord(const LedgerRecord& record, uint64_t lost, const ApiKey::Terms& reader,
                      v1::LedgerRecord& message);

}  // namespace treadle
