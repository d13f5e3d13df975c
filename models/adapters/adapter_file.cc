#include "models/adapters/adapter_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "base/file_calls.h"
#include "base/folder_files.h"
#include "base/number.h"
#include "base/quoted.h"
#include "base/sha256.h"
#include "base/status.h"
#include "kernels/backend.h"
#include "models/adapters/adapter_settings.h"
#include "models/checkpoints/gguf/gguf_file.h"
#include "models/checkpoints/huggingface/safetensors.h"

namespace treadle {

// One adapter while it is read.
class AdapterReader {
 public:
  AdapterReader(const std::string& path, const ModelConfig& config)
      : config_(config), architecture_(ArchitectureOf(config)), file_(new AdapterFile()) {
    file_->path_ = path;
  }

  absl::StatusOr<std::shared_ptr<const AdapterFile>> ReadFolder();
  absl::StatusOr<std::shared_ptr<const AdapterFile>> ReadGguf();
  absl::StatusOr<std::shared_ptr<const AdapterFile>> Take(AdapterContents contents);

 private:
  // A matrix's factors under its name in the file; empty: missing.
  struct Pair {
    StoredTensor a, b;
    bool embedding = false;
  };

  absl::Status AddEntry(const SafetensorsEntry& entry);
  absl::Status AddPair(const std::string& name, const Pair& pair);
  absl::Status Place(AdapterFactors factors);
  TensorName ParseName(const std::string& name) const;
  absl::StatusOr<TensorName> FindMatrix(const std::string& name) const;
  absl::Status CheckShapes(const std::string& name, const AdapterFactors& factors) const;
  absl::Status CheckWhole(const std::string& name, const StoredTensor& tensor) const;
  absl::Status CheckSoftPrompt() const;
  absl::StatusOr<std::shared_ptr<const AdapterFile>> Finish();

  const ModelConfig& config_;
  const Architecture& architecture_;
  std::unique_ptr<AdapterFile> file_;
  std::map<std::string, Pair> pairs_;  // by the matrix's name
  AdapterSettings settings_;
};

namespace {

// The floats of safetensors that weights come in.
const WeightFormat* FloatFormat(std::string_view dtype) {
  if (dtype == "F32") return FindWeightFormat("f32");
  if (dtype == "F16") return FindWeightFormat("f16");
  return dtype == "BF16" ? FindWeightFormat("bf16") : nullptr;
}

}  // namespace

absl::Status AdapterReader::AddEntry(const SafetensorsEntry& entry) {
  constexpr std::string_view kPrefix = "base_model.model.";
  constexpr std::string_view kText = "model.language_model.";
  struct Ending {
    std::string_view text;
    bool b, embedding;
  };
  constexpr Ending kEndings[] = {{".lora_A.weight", false, false},
                                 {".lora_B.weight", true, false},
                                 {".lora_embedding_A", false, true},
                                 {".lora_embedding_B", true, true}};
  const auto* const ending =
      std::ranges::find_if(kEndings, [&](const Ending& e) { return entry.name.ends_with(e.text); });
  const WeightFormat* const format = FloatFormat(entry.dtype);
  // PEFT writes the model's own embeddings, too, where an adapter changes them.
  if (entry.name.ends_with(".base_layer.weight") &&
      entry.shape == std::vector<int64_t>{config_.vocab, config_.hidden}) {
    file_->left_aside_.push_back(entry.name);
    return absl::OkStatus();
  }
  const bool soft = settings_.virtual_tokens > 0;
  if (soft && entry.name != "prompt_embeddings") {
    return InvalidArgument(entry.file, ": tensor ", Quoted(entry.name),
                           " is no soft prompt, expected 'prompt_embeddings' alone");
  }
  if (!soft && (ending == std::end(kEndings) || !entry.name.starts_with(kPrefix))) {
    return InvalidArgument(entry.file, ": tensor ", Quoted(entry.name),
                           " is no factor of a matrix, ",
                           "expected names such as base_model.model.….q_proj.lora_A.weight");
  }
  if (format == nullptr || entry.shape.size() != 2) {
    return InvalidArgument(entry.file, ": tensor ", Quoted(entry.name), " is ", entry.dtype, " ",
                           ShapeText(entry.shape), ", expected a matrix of F32, F16 or BF16");
  }
  const StoredTensor tensor = {.name = entry.name,
                               .format = format,
                               .shape = entry.shape,
                               .data = entry.data.data(),
                               .bytes = entry.data.size()};
  if (soft) {
    file_->soft_prompt_ = tensor;
    return absl::OkStatus();
  }
  std::string module =
      entry.name.substr(kPrefix.size(), entry.name.size() - kPrefix.size() - ending->text.size());
  if (module.starts_with(kText)) module = Str("model.", module.substr(kText.size()));
  Pair& pair = pairs_[module + ".weight"];
  pair.embedding = ending->embedding;
  (ending->b ? pair.b : pair.a) = tensor;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const AdapterFile>> AdapterReader::ReadFolder() {
  // Each is opened and hashed once, and then parsed: the hash is that of what is read here.
  FolderFiles folder(file_->path_);
  TREADLE_ASSIGN_OR_RETURN(const auto config, folder.Open("adapter_config.json"));
  TREADLE_ASSIGN_OR_RETURN(const auto weights, folder.Open("adapter_model.safetensors"));
  TREADLE_ASSIGN_OR_RETURN(settings_, ReadAdapterSettings(*config, config_));
  file_->base_ = settings_.base;
  FileCalls::Get().Use(weights->path());
  TREADLE_ASSIGN_OR_RETURN(const std::vector<SafetensorsEntry> entries, ReadSafetensors(*weights));
  file_->files_ = {weights};
  file_->sources_ = {config, weights};
  for (const SafetensorsEntry& entry : entries) TREADLE_RETURN_IF_ERROR(AddEntry(entry));
  for (const auto& [name, pair] : pairs_) TREADLE_RETURN_IF_ERROR(AddPair(name, pair));
  Sha256 sum;
  for (const auto& file : file_->sources_) {
    TREADLE_ASSIGN_OR_RETURN(const std::string of_file, file->Sum());
    sum.Add(std::as_bytes(std::span(of_file)));
  }
  file_->hash_ = sum.Finish();
  return Finish();
}

absl::StatusOr<std::shared_ptr<const AdapterFile>> AdapterReader::ReadGguf() {
  file_->kind_ = Container::kGguf;
  TREADLE_ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> mapped,
                           MappedFile::Open(file_->path_));
  TREADLE_ASSIGN_OR_RETURN(file_->hash_, mapped->Sum());
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> gguf, GgufFile::Parse(mapped));
  const auto expect = [&](const char* key, std::string_view expected) -> absl::Status {
    TREADLE_ASSIGN_OR_RETURN(const std::string found, gguf->String(key));
    if (found == expected) return absl::OkStatus();
    return InvalidArgument(file_->path_, ": ", key, " is ", Quoted(found), ", expected ",
                           Quoted(expected));
  };
  TREADLE_RETURN_IF_ERROR(expect("general.type", "adapter"));
  TREADLE_RETURN_IF_ERROR(expect("adapter.type", "lora"));
  TREADLE_RETURN_IF_ERROR(expect("general.architecture", architecture_.GgufName()));
  if (gguf->Find("adapter.alora.invocation_tokens") != nullptr) {
    return InvalidArgument(file_->path_, ": adapter.alora.invocation_tokens is set, expected an ",
                           "adapter that applies to all tokens");
  }
  TREADLE_ASSIGN_OR_RETURN(settings_.alpha, gguf->Number("adapter.lora.alpha", 0));
  TREADLE_ASSIGN_OR_RETURN(file_->base_, gguf->String("general.base_model.0.name", ""));
  for (const StoredTensor& tensor : gguf->tensors()) {
    const bool b = tensor.name.ends_with(".lora_b");
    if ((!b && !tensor.name.ends_with(".lora_a")) || tensor.shape.size() != 2 ||
        tensor.format->apart()) {
      return InvalidArgument(file_->path_, ": tensor ", Quoted(tensor.name),
                             " is no factor of a matrix");
    }
    Pair& pair = pairs_[tensor.name.substr(0, tensor.name.size() - 7)];
    (b ? pair.b : pair.a) = tensor;
  }
  file_->files_ = file_->sources_ = {mapped};
  for (const auto& [name, pair] : pairs_) TREADLE_RETURN_IF_ERROR(AddPair(name, pair));
  return Finish();
}

// The model's matrix of that name. A head that the model ties to its embedding counts, and so do
// the folders' names of families whose .gguf files are called alike.
TensorName AdapterReader::ParseName(const std::string& name) const {
  TensorName found = ParseTensorName(architecture_, file_->kind_, name, &config_);
  if (found.row != nullptr) return found;
  found = ParseTensorName(architecture_, file_->kind_, name);
  if (found.row != nullptr && found.row->part == Part::kHead) return found;
  for (const Architecture& other : Architectures()) {
    if (other.GgufName() != architecture_.GgufName()) continue;
    found = ParseTensorName(other, file_->kind_, name);
    if (found.row == nullptr) continue;
    for (const TensorRow* const own : TensorsOf(config_)) {
      if (own->part != found.row->part) continue;
      found.row = own;
      return found;
    }
  }
  return {};
}

absl::StatusOr<TensorName> AdapterReader::FindMatrix(const std::string& name) const {
  const TensorName found = ParseName(name);
  const auto number = [](std::string_view text, int64_t end) {
    const auto value = text.empty() ? std::optional<int64_t>(0) : NumberIn<int64_t>(text);
    return value && *value >= 0 && *value < end;
  };
  const bool is_matrix = found.row != nullptr && found.row->columns != Extent::kNone &&
                         !found.row->bare && found.row->part != Part::kConvolution;
  const bool served = is_matrix && found.row->part != Part::kPositions &&
                      found.row->part != Part::kLayerEmbedding && found.row->part != Part::kKeyUp &&
                      found.row->part != Part::kValueUp &&
                      found.row->part != Part::kLayerInputProjection;
  const bool whole = found.row != nullptr && InExperts(found.row->part) && found.expert.empty();
  if (!served || whole || !number(found.layer, config_.layers) ||
      !number(found.expert, std::max<int64_t>(config_.experts, 1))) {
    return InvalidArgument(file_->path_, ": ", Quoted(name), " is no matrix of a ",
                           architecture_.name, " model with ", config_.layers,
                           " layers that an adapter can change");
  }
  return found;
}

absl::Status AdapterReader::CheckShapes(const std::string& name,
                                        const AdapterFactors& factors) const {
  const ModelConfig layer = InLayer(factors.row->part) ? config_.OfLayer(factors.layer) : config_;
  const int64_t n = SizeOf(factors.row->rows, layer), k = SizeOf(factors.row->columns, layer);
  const bool embedding = factors.row->part == Part::kEmbedding;
  const int64_t inputs = embedding ? n : k, outputs = embedding ? k : n;
  std::vector<int64_t> a = {factors.rank, inputs};
  if (factors.a_by_token) std::swap(a[0], a[1]);
  const std::vector<int64_t> b = {outputs, factors.rank};
  if (factors.rank < 1 || factors.rank > AdapterFile::kMaxRank) {
    return InvalidArgument(file_->path_, ": ", Quoted(name), " has rank ", factors.rank,
                           ", expected 1 to ", AdapterFile::kMaxRank);
  }
  if (factors.a.shape == a && factors.b.shape == b) return absl::OkStatus();
  return InvalidArgument(file_->path_, ": the factors of ", Quoted(name), " are ",
                         ShapeText(factors.a.shape), " and ", ShapeText(factors.b.shape),
                         ", expected ", ShapeText(a), " and ", ShapeText(b),
                         " (is it for another model?)");
}

absl::Status AdapterReader::AddPair(const std::string& name, const Pair& pair) {
  if (pair.a.format == nullptr || pair.b.format == nullptr) {
    return InvalidArgument(file_->path_, ": ", Quoted(name), " has one factor, expected two");
  }
  AdapterFactors factors = {.name = name, .a = pair.a, .b = pair.b};
  const double alpha = settings_.AlphaOf(std::string_view(name).substr(0, name.rfind('.')));
  const auto rank = static_cast<double>(pair.b.shape[1]);
  // llama.cpp's files without an alpha have a scale of 1.
  const bool unscaled = file_->kind_ == Container::kGguf && alpha == 0;
  factors.scale =
      unscaled ? 1 : static_cast<float>(alpha / (settings_.by_root ? std::sqrt(rank) : rank));
  TREADLE_RETURN_IF_ERROR(Place(std::move(factors)));
  const bool embedding = file_->factors_.back().row->part == Part::kEmbedding;
  if (file_->kind_ == Container::kGguf || embedding == pair.embedding) return absl::OkStatus();
  return InvalidArgument(file_->path_, ": the factors of ", Quoted(name), " are called ",
                         Quoted(pair.a.name), ", expected those of ",
                         embedding ? "an embedding" : "a linear layer");
}

// Adds factors once it is known what of the model they are for.
absl::Status AdapterReader::Place(AdapterFactors factors) {
  TREADLE_ASSIGN_OR_RETURN(const TensorName found, FindMatrix(factors.name));
  factors.row = found.row;
  if (!found.layer.empty()) factors.layer = *NumberIn<int64_t>(found.layer);
  if (!found.expert.empty()) factors.expert = *NumberIn<int64_t>(found.expert);
  factors.a_by_token = found.row->part == Part::kEmbedding && file_->kind_ == Container::kGguf;
  factors.rank = factors.b.shape[1];
  TREADLE_RETURN_IF_ERROR(CheckShapes(factors.name, factors));
  file_->rank_ = std::max(file_->rank_, factors.rank);
  const int64_t inputs = factors.a.shape[factors.a_by_token ? 0 : 1];
  const uint64_t bytes = static_cast<uint64_t>(LowRankElements(inputs, factors.rank) +
                                               LowRankElements(factors.rank, factors.b.shape[0])) *
                         SizeOf(factors.LoadedType());
  file_->memory_ += bytes;
  const bool floats = factors.LoadedType() == DType::kF32 && found.row->part != Part::kEmbedding;
  if (floats) file_->halved_ += bytes / 2;
  file_->factors_.push_back(std::move(factors));
  return absl::OkStatus();
}

// A tensor that came otherwise than from a file.
absl::Status AdapterReader::CheckWhole(const std::string& name, const StoredTensor& tensor) const {
  const WeightFormat* const format = tensor.format;
  const bool matrix = tensor.shape.size() == 2;
  const int64_t n = matrix ? tensor.shape[0] : 0, k = matrix ? tensor.shape[1] : 0;
  if (format != nullptr && n > 0 && k > 0 && n < INT32_MAX && k < INT32_MAX && !format->apart() &&
      k % format->block == 0 && tensor.bytes == static_cast<uint64_t>(format->MatrixBytes(n, k))) {
    return absl::OkStatus();
  }
  return InvalidArgument(file_->path_, ": what came for ", Quoted(name), " is no matrix");
}

absl::StatusOr<std::shared_ptr<const AdapterFile>> AdapterReader::Take(AdapterContents contents) {
  file_->kind_ = contents.kind;
  file_->hash_ = std::move(contents.hash);
  file_->contents_ = std::move(contents.memory);
  for (AdapterFactors& factors : contents.factors) {
    TREADLE_RETURN_IF_ERROR(CheckWhole(factors.name, factors.a));
    TREADLE_RETURN_IF_ERROR(CheckWhole(factors.name, factors.b));
    TREADLE_RETURN_IF_ERROR(Place(std::move(factors)));
  }
  if (contents.soft_prompt) {
    TREADLE_RETURN_IF_ERROR(CheckWhole("the soft prompt", *contents.soft_prompt));
    settings_.virtual_tokens = contents.soft_prompt->shape[0];
    file_->soft_prompt_ = *std::move(contents.soft_prompt);
  }
  if (file_->hash_.size() != 64) return InvalidArgument(file_->path_, ": has no hash");
  return Finish();
}

absl::Status AdapterReader::CheckSoftPrompt() const {
  if (settings_.virtual_tokens == 0) return absl::OkStatus();
  if (config_.layer_embedding > 0) {
    return Unimplemented(file_->path_, ": is a soft prompt, and ", architecture_.name, " models ",
                         "with embeddings of their layers need tokens; expected LoRA factors");
  }
  const std::vector<int64_t> expected = {settings_.virtual_tokens, config_.hidden};
  const std::vector<int64_t>& shape = file_->soft_prompt_.shape;
  if (shape == expected && expected[0] < config_.context) return absl::OkStatus();
  return InvalidArgument(file_->path_, ": the soft prompt is ", ShapeText(shape), ", expected ",
                         ShapeText(expected), " within a context of ", config_.context,
                         " (is it for another model?)");
}

absl::StatusOr<std::shared_ptr<const AdapterFile>> AdapterReader::Finish() {
  TREADLE_RETURN_IF_ERROR(CheckSoftPrompt());
  // A stage's part may have none.
  if (file_->factors_.empty() && file_->virtual_tokens() == 0 && !file_->contents_) {
    return InvalidArgument(file_->path_, ": has no factors");
  }
  file_->memory_ += static_cast<uint64_t>(file_->virtual_tokens() * config_.hidden) * sizeof(float);
  TREADLE_RETURN_IF_ERROR(file_->CheckUnchanged());
  std::from_chars(file_->hash_.data(), file_->hash_.data() + 16, file_->id_, 16);
  if (file_->id_ == 0) file_->id_ = 1;
  return std::shared_ptr<const AdapterFile>(std::move(file_));
}

DType AdapterFactors::LoadedType() const {
  int exponent = 0;
  const bool exact = std::frexp(scale, &exponent) == 0.5f && std::abs(exponent) < 8;
  if (a.format != b.format || !exact) return DType::kF32;
  if (a.format->name == "bf16") return DType::kBF16;
  return a.format->name == "f16" && scale == 1 ? DType::kF16 : DType::kF32;
}

absl::Status AdapterFile::CheckUnchanged() const {
  for (const auto& file : files_) TREADLE_RETURN_IF_ERROR(file->CheckUnchanged());
  return absl::OkStatus();
}

absl::Status AdapterFile::Revalidate() const {
  for (const auto& file : files_) TREADLE_RETURN_IF_ERROR(file->Revalidate());
  return absl::OkStatus();
}

bool AdapterFile::IsAtItsPath() const {
  return !sources_.empty() &&
         std::ranges::all_of(sources_, [](const auto& file) { return file->IsAtItsPath(); });
}

absl::StatusOr<std::shared_ptr<const AdapterFile>> AdapterFile::Make(AdapterContents contents,
                                                                     const ModelConfig& config) {
  AdapterReader reader(contents.path, config);
  return reader.Take(std::move(contents));
}

absl::StatusOr<std::shared_ptr<const AdapterFile>> AdapterFile::Open(const std::string& path,
                                                                     const ModelConfig& config) {
  AdapterReader reader(path, config);
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return reader.ReadFolder();
  if (!std::filesystem::exists(path, error)) {
    return NotFound(path, ": no such adapter, expected a PEFT folder or a .gguf file");
  }
  return reader.ReadGguf();
}

}  // namespace treadle
