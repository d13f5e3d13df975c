// The parameters with which requests sample that leave them out: what the model's authors
// recommend, else no temperature but 1 and nothing else.
//
// Pure; any thread.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/request/request.h"

namespace treadle {

// `recommended`: by the names of kSamplingFields, with top_k 0 or -1 for off; `source`: where they
// stand. InvalidArgument names a value that no request may have either.
absl::StatusOr<SamplingParameters> ReadSamplingDefaults(
    const std::map<std::string, double>& recommended, const std::string& source);

// By name: the temperature, and whatever has an effect.
std::vector<std::pair<std::string_view, double>> EffectsOf(const SamplingParameters& parameters);

// As a JSON object of those; every number reads as the same float again.
std::string EffectsJson(const SamplingParameters& parameters);

}  // namespace treadle
