// The family that is most like a model that is not served: by its tensors' names,
// and by fields of config.json.
#include <algorithm>
#include <filesystem>
#include <set>

#include "base/json_file.h"
#include "base/mapped_file.h"
#include "base/quoted.h"
#include "base/status.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/gguf/gguf_file.h"
#include "models/checkpoints/huggingface/safetensors.h"
#include "models/checkpoints/inspect/inspect.h"

namespace treadle {
namespace {

constexpr size_t kMaxListed = 20;  // parts: a file may hold any number of names

using Names = std::set<std::string>;

// Layers alike: "blk.17.attn_q.weight" is "blk.N.attn_q.weight".
std::string WithoutNumbers(std::string_view name) {
  std::string out;
  while (!name.empty()) {
    const std::string_view part = name.substr(0, name.find('.'));
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == part.npos;
    out += Str(out.empty() ? "" : ".", number ? "N" : part);
    name.remove_prefix(std::min(name.size(), part.size() + 1));
  }
  return out;
}

absl::StatusOr<Names> NamesInFolder(const std::string& folder) {
  Names names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    TREADLE_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(entry.path().string()));
    TREADLE_ASSIGN_OR_RETURN(const auto tensors, ReadSafetensors(*file));
    for (const SafetensorsEntry& tensor : tensors) names.insert(WithoutNumbers(tensor.name));
  }
  return names;
}

struct Comparison {
  const Architecture* with = nullptr;
  Names unknown;  // tensors that it has no place for
  Names missing;  // that every model of it has
  size_t distance() const { return unknown.size() + missing.size(); }
};

Comparison Compare(const Architecture& with, Checkpoint::Kind kind, const Names& names) {
  Comparison comparison = {.with = &with, .unknown = {}, .missing = {}};
  std::set<const TensorRow*> found;
  for (const std::string& name : names) {
    const TensorName parsed = ParseTensorName(with, kind, name);
    const bool known =
        parsed.row != nullptr && (parsed.suffix == ".weight" || parsed.row->bias != nullptr);
    if (known) {
      found.insert(parsed.row);
    } else {
      comparison.unknown.insert(name);
    }
  }
  for (const TensorRow& row : with.tensors) {
    const bool optional = row.part == Part::kHead || row.present != nullptr ||
                          ((row.part == Part::kQNorm || row.part == Part::kKNorm) && !with.qk_norm);
    if (optional || found.contains(&row)) continue;
    comparison.missing.insert(SpellTensorName(with, kind, {&row, "N", ".weight", "N"}));
  }
  return comparison;
}

std::string List(const Names& names) {
  std::string text;
  size_t listed = 0;
  for (const std::string& name : names) {
    if (++listed > kMaxListed) return Str(text, " and ", names.size() - kMaxListed, " more");
    text += Str(text.empty() ? "" : ", ", Quoted(name));
  }
  return text;
}

// Fields of config.json for which the family has one value, and this model another.
std::string OtherFields(const std::string& folder, const Architecture& family) {
  const auto json = ReadJsonFile((std::filesystem::path(folder) / "config.json").string());
  std::string text;
  if (!json.ok()) return text;
  for (const FixedField& field : family.config_json.fixed) {
    const auto found = json->find(field.name);
    if (found == json->end() || found->is_null()) continue;
    const std::string value = found->dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    if (value != field.json) {
      text += Str("; ", field.name, " is ", value.substr(0, 100), ", there ", field.json);
    }
  }
  return text;
}

}  // namespace

std::string NearestFamily(const std::string& path) {
  std::error_code error;
  const bool folder = std::filesystem::is_directory(path, error);
  const auto kind = folder ? Checkpoint::Kind::kHuggingFace : Checkpoint::Kind::kGguf;
  Names names;
  if (folder) {
    auto read = NamesInFolder(path);
    if (read.ok()) names = *std::move(read);
  } else if (const auto file = GgufFile::Read(path); file.ok()) {
    for (const StoredTensor& tensor : (*file)->tensors()) names.insert(WithoutNumbers(tensor.name));
  }
  if (names.empty()) return "";
  std::vector<Comparison> all;
  for (const Architecture& family : Architectures()) all.push_back(Compare(family, kind, names));
  const Comparison& nearest = *std::ranges::min_element(all, {}, &Comparison::distance);
  std::string text = Str("nearest known family: ", nearest.with->name);
  if (!nearest.unknown.empty()) {
    text += Str("; it has no part for ", List(nearest.unknown));
  }
  if (!nearest.missing.empty()) text += Str("; this model lacks ", List(nearest.missing));
  if (folder) text += OtherFields(path, *nearest.with);
  return text;
}

}  // namespace treadle
