#include "models/checkpoints/huggingface/quantized_parts.h"

#include <cmath>
#include <utility>

#include "base/json_file.h"

namespace treadle {

using Json = nlohmann::json;

QuantizedParts::QuantizedParts(std::vector<SafetensorsEntry> entries) {
  for (SafetensorsEntry& entry : entries) {
    std::string name = entry.name;
    entries_.emplace(std::move(name), std::move(entry));
  }
}

const SafetensorsEntry* QuantizedParts::Find(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

const SafetensorsEntry* QuantizedParts::Take(std::string_view name) {
  const SafetensorsEntry* entry = Find(name);
  if (entry != nullptr) taken_.emplace(name);
  return entry;
}

absl::StatusOr<const SafetensorsEntry*> QuantizedParts::Require(std::string_view name,
                                                                std::string_view dtype,
                                                                int64_t elements) {
  const SafetensorsEntry* entry = Take(name);
  if (entry == nullptr) {
    const std::string file = entries_.empty() ? "" : entries_.begin()->second.file;
    return InvalidArgument(file, ": tensor ", Quoted(name), " is missing, expected ", dtype, " [",
                           elements, "] beside the codes that it belongs to");
  }
  if (entry->dtype != dtype || (elements >= 0 && entry->Elements() != elements)) {
    return EntryError(*entry, "is ", entry->dtype, " ", ShapeText(entry->shape), ", expected ",
                      dtype, " [", elements, "]");
  }
  return entry;
}

std::vector<float> EntryValues(const SafetensorsEntry& entry) {
  const WeightFormat* format = FindSafetensorsFormat(entry.dtype);
  TREADLE_CHECK(format != nullptr);
  std::vector<float> values(static_cast<size_t>(entry.Elements()));
  format->decode(entry.data.data(), entry.Elements(), values.data());
  return values;
}

absl::StatusOr<std::vector<float>> FiniteValues(const SafetensorsEntry& entry, bool absolute) {
  std::vector<float> values = EntryValues(entry);
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i]) || (absolute && values[i] < 0)) {
      return EntryError(entry, "has ", values[i], " as element ", i, ", expected a finite number",
                        absolute ? " >= 0" : "");
    }
  }
  return values;
}

absl::StatusOr<MatrixDescription> ReadDescription(const SafetensorsEntry& entry,
                                                  const char* block_field) {
  MatrixDescription description;
  TREADLE_ASSIGN_OR_RETURN(
      description.json,
      ParseJsonObject({reinterpret_cast<const char*>(entry.data.data()), entry.data.size()},
                      Str(entry.file, ": tensor ", Quoted(entry.name))));
  constexpr int64_t kMax = int64_t{1} << 30;
  const Json shape = description.json.value("shape", Json());
  if (shape.is_array() && shape.size() == 2) {
    description.n = IntegerIn(shape[0], 1, kMax - 1).value_or(0);
    description.k = IntegerIn(shape[1], 1, kMax - 1).value_or(0);
  }
  if (description.n == 0 || description.k == 0) {
    return EntryError(entry, "has no shape of two extents from 1 to 2^30");
  }
  const Json block = description.json.value(block_field, Json());
  const int64_t whole = description.n * description.k;
  if (!IntegerIn(block, 1, kMax) && !IntegerIn(block, whole, whole)) {
    return EntryError(entry, "has no ", block_field, " from 1 to 2^30");
  }
  description.block = block.get<int64_t>();
  return description;
}

}  // namespace treadle
