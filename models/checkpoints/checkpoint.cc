#include "models/checkpoints/checkpoint.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "base/file_calls.h"
#include "base/number.h"
#include "base/quoted.h"
#include "base/status.h"
#include "models/architectures/config_fields.h"
#include "models/checkpoints/model_path.h"

namespace treadle {

std::string ShapeText(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += Str(i == 0 ? "" : ", ", shape[i]);
  return text + "]";
}

absl::StatusOr<MatrixSource> SourceOf(const StoredTensor& tensor, int64_t n, int64_t k,
                                      MatrixConstants& constants) {
  MatrixSource source = {.format = tensor.format, .data = tensor.data, .n = n, .k = k};
  if (tensor.arranged) {
    constants.codes = tensor.arranged();
    source.data = constants.codes.data();
  }
  if (!tensor.format->apart()) return source;
  TREADLE_ASSIGN_OR_RETURN(constants, tensor.constants());
  source.constants = &constants;
  if (!constants.codes.empty()) source.data = constants.codes.data();
  return source;
}

std::vector<float> DecodeVector(const StoredTensor& tensor) {
  const int64_t blocks = static_cast<int64_t>(tensor.bytes) / tensor.format->block_bytes;
  std::vector<float> values(static_cast<size_t>(blocks * tensor.format->block));
  const std::vector<std::byte> own = tensor.arranged ? tensor.arranged() : std::vector<std::byte>();
  tensor.format->decode(tensor.arranged ? own.data() : tensor.data, blocks, values.data());
  return values;
}

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& path) {
  if (path.starts_with(kRandomPrefix)) return OpenRandom(path);
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return OpenHuggingFace(path);
  if (!std::filesystem::exists(path, error) && !error) return NoModelAt(path);
  return OpenGguf(path);
}

void Checkpoint::AddTurnEnds() {
  if (!tokenizer_) return;
  // Where there is <|return|>, <|end|> is between the messages of one turn.
  constexpr std::string_view kReturn = "<|return|>", kEnd = "<|end|>";
  constexpr std::string_view kTurnEnds[] = {
      kReturn,         kEnd,       "<|im_end|>", "<|eot_id|>",       "<|eom_id|>",
      "<end_of_turn>", "<|call|>", "<turn|>",    "<|tool_response>", "<|eot|>"};
  const auto in_template = [&](std::string_view text) {
    return chat_template_.find(text) != std::string::npos;
  };
  std::vector<int32_t>& ends = tokenizer_->end_ids;
  for (size_t id = 0; id < tokenizer_->tokens.size(); ++id) {
    const TokenizerSpec::Token& token = tokenizer_->tokens[id];
    if (token.kind != TokenKind::kControl && token.kind != TokenKind::kUserDefined) continue;
    if (std::ranges::find(kTurnEnds, token.text) == std::end(kTurnEnds)) continue;
    if (!in_template(token.text) || (token.text == kEnd && in_template(kReturn))) continue;
    const auto end = static_cast<int32_t>(id);
    if (std::ranges::find(ends, end) == ends.end()) ends.push_back(end);
  }
}

absl::Status Checkpoint::CheckUnchanged() const {
  for (const auto& file : weight_files_) TREADLE_RETURN_IF_ERROR(file->CheckUnchanged());
  return absl::OkStatus();
}

absl::Status Checkpoint::Revalidate() const {
  for (const auto& file : weight_files_) TREADLE_RETURN_IF_ERROR(file->Revalidate());
  return absl::OkStatus();
}

const StoredTensor* Checkpoint::Find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

absl::Status Checkpoint::Missing(std::string_view name) const {
  const auto unread = unread_.find(name);
  if (unread == unread_.end()) return InvalidArgument(path_, ": tensor '", name, "' is missing");
  return Unimplemented(path_, ": tensor '", name, "' has dtype ", Quoted(unread->second),
                       ", expected F32, F16 or BF16, or codes with their constants beside them");
}

absl::StatusOr<const StoredTensor*> Checkpoint::Require(
    std::string_view name, std::initializer_list<int64_t> shape) const {
  const StoredTensor* tensor = Find(name);
  if (tensor == nullptr) return Missing(name);
  // A state's vectors are matrices in .gguf files.
  const bool vector = kind_ == Kind::kGguf && shape.size() == 1 && tensor->shape.size() == 2 &&
                      tensor->Elements() == *shape.begin();
  if (!vector && !std::ranges::equal(tensor->shape, shape)) {
    return InvalidArgument(path_, ": tensor '", name, "' has shape ", ShapeText(tensor->shape),
                           ", expected ", ShapeText(std::span(shape.begin(), shape.size())));
  }
  TREADLE_RETURN_IF_ERROR(Fetch(*tensor));
  for (const auto& file : weight_files_) {
    const std::span<const std::byte> bytes = file->bytes();
    if (tensor->data < bytes.data() || tensor->data >= bytes.data() + bytes.size()) continue;
    TREADLE_RETURN_IF_ERROR(file->CheckUnchanged());
    FileCalls::Get().Use(file->path());
  }
  return tensor;
}

absl::StatusOr<const StoredTensor*> Checkpoint::RequireMatrix(std::string_view name) const {
  const StoredTensor* tensor = Find(name);
  if (tensor == nullptr) return Missing(name);
  if (tensor->shape.size() != 2) {
    return InvalidArgument(path_, ": tensor '", name, "' has shape ", ShapeText(tensor->shape),
                           ", expected a matrix");
  }
  return tensor;
}

void Checkpoint::AddTensors(std::vector<StoredTensor> tensors) {
  tensors_ = std::move(tensors);
  index_.clear();
  for (size_t i = 0; i < tensors_.size(); ++i) index_.emplace(tensors_[i].name, i);
}

absl::Status Checkpoint::ArrangeExperts() {
  if (config_.experts == 0) return absl::OkStatus();
  std::map<std::string, size_t> groups;      // the first of a layer's and part's matrices
  std::vector<std::array<size_t, 3>> order;  // group, expert, and where it was
  int64_t stored = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const TensorName name =
        ParseTensorName(ArchitectureOf(config_), kind_, tensors_[i].name, &config_);
    if (name.row == nullptr || name.expert.empty()) {
      order.push_back({i, 0, i});
      continue;
    }
    const std::optional<int32_t> expert = NumberIn<int32_t>(name.expert);
    if (!expert || *expert < 0 || *expert >= config_.experts) {
      return InvalidArgument(path_, ": tensor ", Quoted(tensors_[i].name), " is of expert ",
                             Quoted(name.expert), ", expected 0 to ", config_.experts - 1);
    }
    const std::string group = Str(name.layer, " ", name.row->gguf, name.suffix);
    order.push_back({groups.try_emplace(group, i).first->second, size_t(*expert), i});
    stored = std::max<int64_t>(stored, *expert + 1);
  }
  if (stored != config_.experts) {
    return InvalidArgument(path_, ": has tensors of ", stored, " experts, expected ",
                           config_.experts);
  }
  std::ranges::sort(order);
  std::vector<StoredTensor> tensors;
  for (const auto& place : order) tensors.push_back(std::move(tensors_[place[2]]));
  AddTensors(std::move(tensors));
  return absl::OkStatus();
}

absl::Status Checkpoint::CheckRope(const Architecture& architecture) const {
  const int64_t rotated = config_.rope_dim;
  if (rotated % 2 != 0 || rotated < 2 || rotated > config_.head_dim) {
    return InvalidArgument(path_, ": ", rotated, " rotated elements of a head, expected an even ",
                           "number from 2 to ", config_.head_dim);
  }
  const std::string where = Str(path_, ": rope scaling");
  if (const auto& scaling = config_.rope_scaling) {
    TREADLE_RETURN_IF_ERROR(CheckRanges(*scaling, architecture, where));
    if (scaling->high_freq_factor <= scaling->low_freq_factor) {
      return InvalidArgument(where, ": high_freq_factor is ", scaling->high_freq_factor,
                             ", expected more than low_freq_factor, ", scaling->low_freq_factor);
    }
  }
  if (const auto& yarn = config_.yarn) {
    TREADLE_RETURN_IF_ERROR(CheckRanges(*yarn, architecture, where));
    if (!(yarn->beta_fast > yarn->beta_slow)) {
      return InvalidArgument(where, ": beta_fast is ", yarn->beta_fast,
                             ", expected more than beta_slow, ", yarn->beta_slow);
    }
    if (!(config_.rope_base > 1)) {
      return InvalidArgument(where, ": base is ", config_.rope_base, ", expected more than 1");
    }
  }
  if (const auto& rope = config_.long_rope) {
    TREADLE_RETURN_IF_ERROR(CheckRanges(*rope, architecture, where));
    for (const auto* factors : {&rope->short_factors, &rope->long_factors}) {
      if (std::ssize(*factors) == rotated / 2) continue;
      return InvalidArgument(where, ": ", factors->size(), " factors, expected one for each of ",
                             rotated / 2, " pairs");
    }
  }
  return absl::OkStatus();
}

// Layers that differ in their heads, or have no K and V of their own.
absl::Status Checkpoint::CheckLayers() const {
  if (const int64_t heads = config_.KvHeads(/*local=*/true); config_.heads % heads != 0) {
    return InvalidArgument(path_, ": ", config_.heads, " heads cannot share ", heads,
                           " K/V heads of local layers evenly");
  }
  if (config_.local_head_dim % 2 != 0) {
    return InvalidArgument(path_, ": head size of local layers is ", config_.local_head_dim,
                           ", expected an even number");
  }
  if (!config_.keys_are_values && config_.local_kv_heads > 0 &&
      config_.kv_heads != config_.local_kv_heads) {
    return Unimplemented(path_, ": ", config_.kv_heads, " K/V heads of global layers and ",
                         config_.local_kv_heads, " of local ones, expected as many of both, for ",
                         "values are products of their own");
  }
  if (config_.shared_kv_layers > config_.layers || config_.LastStageBegin() < 0) {
    return InvalidArgument(path_, ": ", config_.shared_kv_layers, " of ", config_.layers,
                           " layers share K and V, expected a layer of each kind before these");
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::CheckStates(const Architecture& architecture) const {
  if (architecture.states == StateKind::kNone) {
    if (!config_.HasStates()) return absl::OkStatus();
    return InvalidArgument(path_, ": has layers that keep a state, expected none of ",
                           architecture.name);
  }
  if (config_.window > 0) {
    return Unimplemented(path_, ": has layers that keep a state, and a sliding window of ",
                         config_.window, " positions, expected none");
  }
  if (architecture.states == StateKind::kConvolution) {
    const bool whole = config_.state_key_heads == 0 && config_.state_heads == config_.hidden &&
                       config_.state_value_dim == 1;
    if (whole && config_.conv_taps > 0) return absl::OkStatus();
    return InvalidArgument(path_, ": convolutions of ", config_.conv_taps, " positions and ",
                           config_.state_heads, " channels, expected 1 or more of ",
                           config_.hidden);
  }
  if (config_.state_heads % config_.state_key_heads == 0) return absl::OkStatus();
  return InvalidArgument(path_, ": ", config_.state_heads, " value heads of a state cannot share ",
                         config_.state_key_heads, " key heads evenly");
}

absl::Status Checkpoint::CheckConsistency() const {
  const Architecture* const architecture = FindArchitecture(config_.architecture);
  if (architecture == nullptr) {
    return Unimplemented(path_, ": architecture ", Quoted(config_.architecture),
                         ", expected one of ", KnownArchitectures());
  }
  TREADLE_RETURN_IF_ERROR(CheckRanges(config_, *architecture, path_));
  if (config_.heads % config_.kv_heads != 0) {
    return InvalidArgument(path_, ": ", config_.heads, " heads cannot share ", config_.kv_heads,
                           " K/V heads evenly");
  }
  TREADLE_RETURN_IF_ERROR(CheckLayers());
  if (!architecture->grouped &&
      (config_.kv_heads != config_.heads || config_.heads * config_.head_dim != config_.hidden)) {
    return InvalidArgument(path_, ": ", config_.heads, " heads of ", config_.head_dim, " and ",
                           config_.kv_heads, " K/V heads, expected as many, of hidden size ",
                           config_.hidden, " together");
  }
  if (architecture->experts && config_.experts_per_token > config_.experts) {
    return InvalidArgument(path_, ": experts per token is ", config_.experts_per_token,
                           ", expected 1 to ", config_.experts);
  }
  if (architecture->gated_rows && config_.experts_per_token != 1) {
    return Unimplemented(path_, ": experts per token is ", config_.experts_per_token,
                         ", expected 1 of ", architecture->name);
  }
  const bool as_latents = config_.latent_dim > 0 && config_.kv_heads == 1 &&
                          config_.head_dim == config_.latent_dim + config_.rope_dim;
  if (architecture->latent ? !as_latents : config_.latent_dim != 0) {
    return InvalidArgument(path_, ": ", config_.kv_heads, " K/V heads of ", config_.head_dim,
                           " and latents of ", config_.latent_dim, ", not those of ",
                           architecture->name);
  }
  const int64_t groups = config_.expert_groups, used = config_.used_expert_groups;
  if (groups > 1) {
    const int64_t each = config_.experts / groups;
    const int64_t least = architecture->sigmoid_router ? 2 : 1;  // Backend::Route's
    if (config_.experts % groups != 0 || each < least || used > groups ||
        config_.experts_per_token > used * each) {
      return InvalidArgument(path_, ": ", used, " of ", groups, " groups of ", config_.experts,
                             " experts for ", config_.experts_per_token, " per token, expected ",
                             "equal groups of at least ", least, " that have as many");
    }
  }
  if (!architecture->experts && config_.experts != 0) {
    return InvalidArgument(path_, ": experts is ", config_.experts, ", expected none of ",
                           architecture->name);
  }
  if (architecture->one_block == config_.ffn_layers.empty()) {
    return InvalidArgument(path_, ": ", config_.ffn_layers.size(),
                           " layers are a feed-forward network alone, expected ",
                           architecture->one_block ? "some of " : "none of ", architecture->name);
  }
  TREADLE_RETURN_IF_ERROR(CheckStates(*architecture));
  if (architecture->rotary) TREADLE_RETURN_IF_ERROR(CheckRope(*architecture));
  if (tokenizer_ && static_cast<int64_t>(tokenizer_->tokens.size()) > config_.vocab) {
    return InvalidArgument(path_, ": the tokenizer has ", tokenizer_->tokens.size(),
                           " tokens, the model's vocabulary ", config_.vocab);
  }
  return absl::OkStatus();
}

}  // namespace treadle
