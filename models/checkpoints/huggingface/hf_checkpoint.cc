// A Hugging Face folder as a Checkpoint.
#include <algorithm>
#include <filesystem>
#include <iterator>
#include <set>

#include "base/file_calls.h"
#include "base/folder_files.h"
#include "base/json_file.h"
#include "base/mapped_file.h"
#include "base/number.h"
#include "base/quoted.h"
#include "base/status.h"
#include "base/utf8.h"
#include "models/architectures/config_fields.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/huggingface/fused_experts.h"
#include "models/checkpoints/huggingface/hf_quantization.h"
#include "models/checkpoints/huggingface/safetensors.h"
#include "models/checkpoints/huggingface/text_files.h"
#include "models/checkpoints/latent_tensors.h"
#include "models/text/tiktoken_file.h"
#include "models/text/tokenizer_json.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

// Named in the index by whoever made the file: nothing but a plain name in the same folder, which
// errors can show as it is.
bool IsPlainName(const std::string& name) {
  return !name.empty() && name.find('/') == std::string::npos && name != "." && name != ".." &&
         Printable(name) == name;
}

// chat_template of tokenizer_config.json: a string, or a list of named ones.
std::string DefaultTemplate(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return "";
  for (const Json& entry : value) {
    if (entry.is_object() && entry.value("name", Json()) == "default" &&
        entry.value("template", Json()).is_string()) {
      return entry["template"].get<std::string>();
    }
  }
  return "";
}

constexpr const char* kGenerationConfig = "generation_config.json";

class HuggingFaceCheckpoint final : public Checkpoint {
 public:
  absl::Status Read(const std::string& folder);
  absl::StatusOr<RecommendedSampling> Sampling() const override;

 private:
  absl::Status ReadShards(FolderFiles& files, const HfQuantization& quantization);
  absl::Status ReadTextSide(FolderFiles& files);

  std::shared_ptr<const MappedFile> generation_config_;  // null: there is none
};

absl::Status HuggingFaceCheckpoint::Read(const std::string& folder) {
  kind_ = Kind::kHuggingFace;
  path_ = folder;
  std::filesystem::path name = std::filesystem::path(folder).lexically_normal();
  if (name.filename().empty()) name = name.parent_path();
  model_name_ = name.filename().string();
  FolderFiles files(folder);
  TREADLE_ASSIGN_OR_RETURN(config_file_, files.Open("config.json"));
  TREADLE_ASSIGN_OR_RETURN(const HfConfig read, ReadHfConfig(*config_file_));
  config_ = read.config;
  TREADLE_RETURN_IF_ERROR(ReadShards(files, read.quantization));
  TREADLE_RETURN_IF_ERROR(ReadTextSide(files));
  TREADLE_RETURN_IF_ERROR(CheckConsistency());
  return ArrangeExperts();
}

// Matrices called `fused` as their two halves, gate_proj and up_proj. Such a matrix in a format
// whose rows cannot be told apart stays as it is, and is then a tensor that the model has no place
// for.
std::vector<StoredTensor> WithGatesApart(std::vector<StoredTensor> tensors,
                                         std::string_view fused) {
  std::vector<StoredTensor> out;
  for (StoredTensor& tensor : tensors) {
    const bool whole = !tensor.name.ends_with(fused) || tensor.format->apart() ||
                       tensor.shape.size() != 2 || tensor.shape[0] % 2 != 0;
    if (whole) {
      out.push_back(std::move(tensor));
      continue;
    }
    const std::string_view kept(tensor.name.data(), tensor.name.rfind(fused));
    const std::string_view module = fused.substr(0, fused.find('.') + 1);
    for (const char* const half : {"gate_proj.weight", "up_proj.weight"}) {
      StoredTensor part = tensor;
      part.name = Str(kept, module, half);
      part.shape[0] /= 2;
      part.bytes /= 2;
      part.data += half[0] == 'g' ? 0 : part.bytes;
      out.push_back(std::move(part));
    }
  }
  return out;
}

// Matrices in_proj_qkvz, which hold each key head's query, key, values and gates behind those of
// another, as two: in_proj_qkv, with all queries first, and in_proj_z. Sizes are in their ranges.
std::vector<StoredTensor> WithStatesApart(std::vector<StoredTensor> tensors,
                                          const ModelConfig& config) {
  constexpr std::string_view kFused = "in_proj_qkvz.weight";
  const int64_t values = config.state_heads / config.state_key_heads * config.state_value_dim;
  const int64_t each = 2 * (config.state_key_dim + values);  // rows of a key head
  std::vector<StoredTensor> out;
  for (StoredTensor& tensor : tensors) {
    if (!tensor.name.ends_with(kFused) || tensor.format->apart() || tensor.shape.size() != 2 ||
        tensor.shape[0] != config.state_key_heads * each) {
      out.push_back(std::move(tensor));
      continue;
    }
    std::vector<int64_t> rows;  // of the file, in the order of both
    const auto add = [&](int64_t first, int64_t count) {
      for (int64_t row = 0; row < config.state_key_heads * count; ++row) {
        rows.push_back(row / count * each + first + row % count);
      }
    };
    add(0, config.state_key_dim);
    add(config.state_key_dim, config.state_key_dim);
    add(2 * config.state_key_dim, values);
    add(2 * config.state_key_dim + values, values);
    const std::string module = tensor.name.substr(0, tensor.name.size() - kFused.size());
    const auto bytes = static_cast<size_t>(tensor.format->RowBytes(tensor.shape[1]));
    const auto split = [&](const char* name, std::span<const int64_t> own) {
      StoredTensor& part = out.emplace_back(tensor);
      part.name = Str(module, name, ".weight");
      part.shape[0] = std::ssize(own);
      part.bytes = own.size() * bytes;
      part.data = nullptr;
      part.arranged = [from = tensor.data, bytes, order = std::vector(own.begin(), own.end())] {
        std::vector<std::byte> made;
        for (const int64_t row : order) {
          const std::byte* const begin = from + static_cast<size_t>(row) * bytes;
          made.insert(made.end(), begin, begin + bytes);
        }
        return made;
      };
    };
    const auto gates = static_cast<size_t>(config.state_key_heads * values);
    split("in_proj_qkv", std::span(rows).first(rows.size() - gates));
    split("in_proj_z", std::span(rows).last(gates));
  }
  return out;
}

// The layer in a name "model.layers.3.", if it is not one of the first `layers`: a head that
// guesses is stored so. Empty: none.
std::string LayerBehind(std::string_view name, int64_t layers) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) return "";
  name.remove_prefix(kLayers.size());
  const std::string_view number = name.substr(0, name.find('.'));
  const std::optional<int64_t> layer = NumberIn<int64_t>(number);
  return layer && *layer >= layers ? Str("layers.", number) : "";
}

// Keeps the tensors of a model of several kinds of input that are of text, under the names that a
// model of text alone has. Returns the names of the parts that are left aside, as "vision_tower".
std::vector<std::string> KeepText(std::vector<SafetensorsEntry>& entries, int64_t layers) {
  constexpr std::string_view kModel = "model.", kText = "model.language_model.";
  constexpr std::string_view kWhole = "language_model.";  // before all names (Llama 4)
  if (std::ranges::any_of(entries, [&](const auto& e) { return e.name.starts_with(kWhole); })) {
    std::set<std::string> others;
    std::erase_if(entries, [&](SafetensorsEntry& entry) {
      const bool own = entry.name.starts_with(kWhole);
      if (own) entry.name.erase(0, kWhole.size());
      if (!own) others.insert(entry.name.substr(0, entry.name.find('.')));
      return !own;
    });
    return {others.begin(), others.end()};
  }
  const auto text = [&](const SafetensorsEntry& entry) { return entry.name.starts_with(kText); };
  std::set<std::string> parts;
  std::erase_if(entries, [&](const SafetensorsEntry& entry) {
    const std::string part =
        entry.name.starts_with("mtp.") ? "mtp" : LayerBehind(entry.name, layers);
    if (!part.empty()) parts.insert(part);
    return !part.empty();
  });
  if (std::ranges::none_of(entries, text)) return {parts.begin(), parts.end()};
  std::erase_if(entries, [&](SafetensorsEntry& entry) {
    if (entry.name.starts_with(kText)) {
      entry.name = Str(kModel, entry.name.substr(kText.size()));
    } else if (entry.name.starts_with(kModel)) {
      const std::string rest = entry.name.substr(kModel.size());
      parts.insert(rest.substr(0, rest.find('.')));
      return true;
    }
    return false;
  });
  return {parts.begin(), parts.end()};
}

absl::Status HuggingFaceCheckpoint::ReadShards(FolderFiles& files,
                                               const HfQuantization& quantization) {
  std::set<std::string> names;
  constexpr const char* kWhole = "model.safetensors";
  constexpr const char* kIndex = "model.safetensors.index.json";
  const std::string index_path = files.PathOf(kIndex);
  if (std::filesystem::exists(files.PathOf(kWhole))) {
    names.insert(kWhole);
  } else if (files.Has(kIndex)) {
    TREADLE_ASSIGN_OR_RETURN(const Json index, files.Json(kIndex));
    const Json& map = index.value("weight_map", Json());
    if (!map.is_object()) return InvalidArgument(index_path, ": weight_map is not an object");
    for (const auto& [tensor, shard] : map.items()) {
      if (!shard.is_string() || !IsPlainName(shard.get<std::string>())) {
        return InvalidArgument(index_path, ": the shard of ", Quoted(tensor),
                               " is not a file name");
      }
      names.insert(shard.get<std::string>());
    }
  } else {
    return NotFound(path_, ": has neither model.safetensors nor model.safetensors.index.json");
  }
  std::vector<SafetensorsEntry> entries;
  std::set<std::string> seen;
  for (const std::string& name : names) {
    TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<MappedFile> file,
                             MappedFile::Open(files.PathOf(name)));
    TREADLE_ASSIGN_OR_RETURN(std::vector<SafetensorsEntry> part, ReadSafetensors(*file));
    for (SafetensorsEntry& entry : part) {
      if (!seen.insert(entry.name).second) {
        return InvalidArgument(file->path(), ": tensor ", Quoted(entry.name),
                               " is in another shard too");
      }
      entries.push_back(std::move(entry));
    }
    file_bytes_ += file->bytes().size();
    weight_files_.push_back(std::move(file));
  }
  left_aside_ = KeepText(entries, config_.layers);
  for (SafetensorsEntry& entry : entries) {
    // Convolutions: [channels, 1, taps].
    const bool convolution =
        entry.name.ends_with("conv1d.weight") || entry.name.ends_with("conv.conv.weight");
    if (entry.shape.size() == 3 && entry.shape[1] == 1 && convolution) {
      entry.shape.erase(entry.shape.begin() + 1);
    }
    if (!IsNumber(entry.name)) continue;
    entry.name += ".weight";
    if (entry.shape.empty()) entry.shape = {1};
  }
  std::vector<StoredTensor> experts;
  const Architecture& architecture = ArchitectureOf(config_);
  if (architecture.hugging_face_experts != FusedExperts::kNever) {
    TREADLE_ASSIGN_OR_RETURN(experts, TakeFusedExperts(entries, architecture.hugging_face_experts));
  }
  TREADLE_ASSIGN_OR_RETURN(MergedTensors merged, MergeQuantized(std::move(entries), quantization));
  std::ranges::move(experts, std::back_inserter(merged.tensors));
  if (const std::string_view fused = architecture.hugging_face_gate_up; !fused.empty()) {
    merged.tensors = WithGatesApart(std::move(merged.tensors), fused);
  }
  if (architecture.hugging_face_fused_states) {
    TREADLE_RETURN_IF_ERROR(CheckRanges(config_, architecture, path_));
    merged.tensors = WithStatesApart(std::move(merged.tensors), config_);
  }
  if (architecture.latent) {
    TREADLE_RETURN_IF_ERROR(CheckRanges(config_, architecture, path_));
    TREADLE_ASSIGN_OR_RETURN(merged.tensors,
                             WithLatentsApart(std::move(merged.tensors), config_, kind_));
  }
  AddTensors(std::move(merged.tensors));
  unread_ = std::move(merged.unread);
  return absl::OkStatus();
}

absl::Status HuggingFaceCheckpoint::ReadTextSide(FolderFiles& files) {
  if (files.Has("tokenizer.json") || files.Has(kTiktokenFile)) {
    TREADLE_ASSIGN_OR_RETURN(tokenizer_, ReadTokenizerJson(files));
  } else {
    TREADLE_ASSIGN_OR_RETURN(end_ids_, ReadEndIds(files, config_.vocab));
  }
  TREADLE_ASSIGN_OR_RETURN(const auto jinja, files.Find("chat_template.jinja"));
  if (jinja != nullptr) {
    FileCalls::Get().Use(jinja->path());
    chat_template_ = jinja->text();
    TREADLE_RETURN_IF_ERROR(jinja->CheckUnchanged());
  }
  for (const char* name : {"chat_template.json", "tokenizer_config.json"}) {
    if (!chat_template_.empty() || !files.Has(name)) continue;
    TREADLE_ASSIGN_OR_RETURN(const Json json, files.Json(name));
    chat_template_ = DefaultTemplate(json.value("chat_template", Json()));
  }
  // Opened now, also if nobody asks for its values: they belong to this version of the model.
  TREADLE_ASSIGN_OR_RETURN(generation_config_, files.Find(kGenerationConfig));
  text_files_ = ReadTextFiles(files);
  AddTurnEnds();
  return absl::OkStatus();
}

absl::StatusOr<RecommendedSampling> HuggingFaceCheckpoint::Sampling() const {
  const std::string path = (std::filesystem::path(path_) / kGenerationConfig).string();
  RecommendedSampling sampling{.source = path, .values = {}};
  if (generation_config_ == nullptr) return sampling;
  TREADLE_ASSIGN_OR_RETURN(const Json json, ParseJsonFile(*generation_config_));
  for (const auto& [name, key] : kSamplingNames) {
    const auto value = json.find(name);
    if (value == json.end() || value->is_null()) continue;
    if (!value->is_number()) {
      return InvalidArgument(path, ": ", name, " is ", Cut(value->dump(), 80),
                             ", expected a number");
    }
    sampling.values.emplace(name, value->get<double>());
  }
  const Json samples = json.value("do_sample", Json());
  if (!samples.is_null() && !samples.is_boolean()) {
    return InvalidArgument(path, ": do_sample is ", Cut(samples.dump(), 80),
                           ", expected true or false");
  }
  if (samples == false) sampling.values["temperature"] = 0;
  return sampling;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenHuggingFace(const std::string& folder) {
  auto checkpoint = std::make_unique<HuggingFaceCheckpoint>();
  TREADLE_RETURN_IF_ERROR(checkpoint->Read(folder));
  return checkpoint;
}

}  // namespace treadle
