#include "server/session/sampling_defaults.h"

#include <charconv>
#include <cmath>
#include <cstdint>
#include <variant>

#include "base/status.h"

namespace treadle {

absl::StatusOr<SamplingParameters> ReadSamplingDefaults(
    const std::map<std::string, double>& recommended, const std::string& source) {
  SamplingParameters defaults;
  for (const SamplingField& field : kSamplingFields) {
    const auto found = recommended.find(std::string(field.name));
    if (found == recommended.end()) continue;
    const double value = found->second;
    const auto* real = std::get_if<float SamplingParameters::*>(&field.member);
    const bool off = real == nullptr && (value == 0 || value == -1);
    const bool whole = real != nullptr || (value == std::floor(value) && value <= INT32_MAX);
    if (!off && !(whole && field.Allows(value))) {
      return InvalidArgument(source, ": ", field.name, " is ", value, ", expected ",
                             real == nullptr ? "a whole number, " : "", field.expected,
                             real == nullptr ? ", or 0 for off" : "",
                             "; --generation-config none does not read it");
    }
    if (real != nullptr) {
      defaults.*(*real) = static_cast<float>(value);
    } else {
      defaults.*std::get<int32_t SamplingParameters::*>(field.member) =
          off ? 0 : static_cast<int32_t>(value);
    }
  }
  return defaults;
}

std::vector<std::pair<std::string_view, double>> EffectsOf(const SamplingParameters& parameters) {
  static const SamplingParameters kNone;
  std::vector<std::pair<std::string_view, double>> effects;
  for (const SamplingField& field : kSamplingFields) {
    const auto value_in = [&field](const SamplingParameters& of) {
      return std::visit([&](auto member) { return static_cast<double>(of.*member); }, field.member);
    };
    const double value = value_in(parameters);
    if (value != value_in(kNone) || field.name == "temperature") {
      effects.emplace_back(field.name, value);
    }
  }
  return effects;
}

std::string EffectsJson(const SamplingParameters& parameters) {
  std::string json;
  for (const auto& [name, value] : EffectsOf(parameters)) {
    char digits[32];
    const auto end = std::to_chars(digits, digits + sizeof digits, static_cast<float>(value)).ptr;
    json += Str(json.empty() ? "{" : ",", "\"", name, "\":", std::string_view(digits, end));
  }
  return json + "}";
}

}  // namespace treadle
