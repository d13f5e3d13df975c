#include "bench/load/spec_decode.h"

#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_split.h"
#include "base/number.h"

namespace treadle {
namespace {

void Add(std::optional<double>& to, double value) { to = to.value_or(0) + value; }

std::optional<double> Difference(std::optional<double> before, std::optional<double> after) {
  if (!before || !after) return std::nullopt;
  return *after - *before;
}

}  // namespace

std::optional<SpecDecode> ReadSpecDecode(std::string_view metrics) {
  for (const std::string_view prefix : {"vllm:spec_decode_num_", "treadle:spec_decode_num_"}) {
    SpecDecode counted;
    bool found = false;
    for (const std::string& text : std::vector<std::string>(
             absl::StrSplit(absl::string_view(metrics.data(), metrics.size()), '\n'))) {
      const std::string_view line = text;
      const size_t space = line.rfind(' ');
      if (!line.starts_with(prefix) || space == line.npos) continue;
      const std::optional<double> value = NumberIn<double>(line.substr(space + 1));
      const std::string_view name =
          line.substr(prefix.size(), line.find_first_of("{ ") - prefix.size());
      if (!value) continue;
      found = true;
      if (name == "drafts_total") Add(counted.drafts, *value);
      if (name == "draft_tokens_total") Add(counted.draft_tokens, *value);
      if (name == "accepted_tokens_total") Add(counted.accepted_tokens, *value);
      static constexpr std::string_view kPosition = "position=\"";
      const size_t at = line.find(kPosition);
      if (name != "accepted_tokens_per_pos_total" || at == line.npos) continue;
      const std::string_view rest = line.substr(at + kPosition.size());
      if (const auto position = NumberIn<int>(rest.substr(0, rest.find('"')))) {
        counted.accepted_at[*position] += *value;
      }
    }
    if (found) return counted;
  }
  return std::nullopt;
}

void AddSpecDecode(const SpecDecode& before, const SpecDecode& after,
                   nlohmann::ordered_json& report) {
  const auto drafts = Difference(before.drafts, after.drafts);
  const auto tokens = Difference(before.draft_tokens, after.draft_tokens);
  const auto accepted = Difference(before.accepted_tokens, after.accepted_tokens);
  if (!tokens || !accepted || *tokens <= 0) return;
  report["spec_decode_acceptance_rate"] = *accepted / *tokens * 100;  // %, as vLLM has it
  if (drafts && *drafts > 0) {
    report["spec_decode_acceptance_length"] = 1 + *accepted / *drafts;
    report["spec_decode_num_drafts"] = static_cast<int64_t>(*drafts);
  }
  report["spec_decode_draft_tokens"] = static_cast<int64_t>(*tokens);
  report["spec_decode_accepted_tokens"] = static_cast<int64_t>(*accepted);
  if (!drafts || *drafts <= 0 || after.accepted_at.empty()) return;
  auto& rates = report["spec_decode_per_position_acceptance_rates"] =
      nlohmann::ordered_json::array();
  for (const auto& [position, count] : after.accepted_at) {
    const auto earlier = before.accepted_at.find(position);
    rates.push_back((count - (earlier == before.accepted_at.end() ? 0 : earlier->second)) /
                    *drafts);
  }
}

}  // namespace treadle
