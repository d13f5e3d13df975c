// A whole answer on the terminal. Pure, but for what is printed.
#pragma once

#include <string>

namespace treadle::v1 {
class GenerateResponse;
}

namespace treadle {

// One JSON object; `prompt_logprobs`: with those of the prompt.
std::string AnswerToJson(const v1::GenerateResponse& answer, bool prompt_logprobs);
// A line for each candidate.
void PrintCandidates(const v1::GenerateResponse& answer);
// Tokens and times, in one line on stderr.
void PrintSummary(const v1::GenerateResponse& answer);

}  // namespace treadle
