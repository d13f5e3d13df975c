#include "models/checkpoints/write/hf_folder_files.h"

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "base/json_file.h"
#include "base/mapped_file.h"
#include "base/status.h"
#include "models/architectures/architecture.h"
#include "models/text/tokenizer_json_writer.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Neither weights nor what describes them.
bool IsTextSide(const std::string& name) {
  if (name == "config.json" || name.ends_with(".index.json")) return false;
  if (name.starts_with("LICENSE") || name.starts_with("NOTICE")) return true;
  return std::ranges::any_of(
      std::initializer_list<std::string_view>{".json", ".txt", ".jinja", ".model"},
      [&](std::string_view ending) { return name.ends_with(ending); });
}

absl::Status CopyTextFiles(const std::string& from, const OutputFolder& folder) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(from, error)) {
    const std::string name = entry.path().filename().string();
    std::error_code ignored;
    if (!IsTextSide(name) || !entry.is_regular_file(ignored) || entry.file_size(ignored) == 0) {
      continue;
    }
    TREADLE_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(entry.path().string()));
    TREADLE_RETURN_IF_ERROR(folder.Write(
        name, {reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size()}));
  }
  if (error) return InvalidArgument(from, ": cannot be listed: ", error.message());
  return absl::OkStatus();
}

absl::StatusOr<Json> MakeConfig(const Checkpoint& source) {
  const ModelConfig& config = source.config();
  const Architecture& architecture = ArchitectureOf(config);
  const ConfigJson& fields = architecture.config_json;
  if (config.rope_dim != config.head_dim) {
    return Unimplemented(source.path(), ": rotates ", config.rope_dim, " of ", config.head_dim,
                         " elements of a head, which config.json cannot say");
  }
  Json json = {{"architectures", {fields.classes[0]}},
               {"model_type", architecture.name},
               {fields.epsilon, config.norm_epsilon},
               {"rope_theta", config.rope_base},
               {"tie_word_embeddings", config.tied_head},
               {"dtype", "float32"},
               {"torch_dtype", "float32"}};
  for (const SizeField& field : fields.sizes) json[field.name] = config.*field.size;
  for (const FixedField& field : fields.fixed) json[field.name] = Json::parse(field.json);
  if (architecture.qkv_bias == Presence::kAsStored) {
    if (config.qkv_bias != config.output_bias) {
      return Unimplemented(source.path(),
                           ": has biases on Q, K and V alone, which config.json cannot say");
    }
    json["attention_bias"] = config.qkv_bias;
  }
  if (config.rope_linear_factor != 1) {
    json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", config.rope_linear_factor}};
  }
  if (const TokenizerSpec* tokenizer = source.tokenizer()) {
    if (tokenizer->bos >= 0) json["bos_token_id"] = tokenizer->bos;
    if (tokenizer->eos >= 0) json["eos_token_id"] = tokenizer->eos;
    if (tokenizer->padding >= 0) json["pad_token_id"] = tokenizer->padding;
  }
  return json;
}

}  // namespace

absl::StatusOr<Json> HfConfigOf(const Checkpoint& source) {
  if (source.kind() == Checkpoint::Kind::kGguf) return MakeConfig(source);
  return ReadJsonFile((fs::path(source.path()) / "config.json").string());
}

absl::Status WriteHfTextFiles(const Checkpoint& source, const OutputFolder& folder) {
  if (source.kind() == Checkpoint::Kind::kHuggingFace) return CopyTextFiles(source.path(), folder);
  const TokenizerSpec* tokenizer = source.tokenizer();
  if (tokenizer == nullptr || !HasTokenizerJson(*tokenizer)) return absl::OkStatus();
  for (const auto& [name, text] :
       TokenizerJsonFiles(*tokenizer, source.chat_template(), source.config().context)) {
    TREADLE_RETURN_IF_ERROR(folder.Write(name, text));
  }
  return absl::OkStatus();
}

}  // namespace treadle
