// How many guesses of next tokens a server has verified, by its metrics in Prometheus' text format:
// vLLM's names (vllm:spec_decode_...), or Treadle's. Pure.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string_view>

namespace treadle {

// Counters. A number that is not told is absent.
struct SpecDecode {
  std::optional<double> drafts, draft_tokens, accepted_tokens;
  std::map<int, double> accepted_at;  // by position in the draft
};

// Nothing where the server does not count any. Of a server that tells both names, vLLM's count.
std::optional<SpecDecode> ReadSpecDecode(std::string_view metrics);

// Counts of guesses in between, by vLLM's keys spec_decode_...; those that do not follow from what
// is told are left out, and all of them if nothing was guessed.
void AddSpecDecode(const SpecDecode& before, const SpecDecode& after,
                   nlohmann::ordered_json& report);

}  // namespace treadle
