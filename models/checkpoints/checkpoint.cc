#include "models/checkpoints/checkpoint.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "base/number.h"
#include "base/quoted.h"
#include "base/status.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/random/random_checkpoint.h"

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

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& path) {
  if (path.starts_with(RandomCheckpoint::kPrefix)) return RandomCheckpoint::Open(path);
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return OpenHuggingFace(path);
  return OpenGguf(path);
}

std::vector<FileState> Checkpoint::file_states() const {
  std::vector<FileState> states;
  for (const auto& file : mapped_) states.push_back(file->state());
  return states;
}

absl::Status Checkpoint::CheckUnchanged() const {
  for (const auto& file : mapped_) TREADLE_RETURN_IF_ERROR(file->CheckUnchanged());
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
  if (!std::ranges::equal(tensor->shape, shape)) {
    return InvalidArgument(path_, ": tensor '", name, "' has shape ", ShapeText(tensor->shape),
                           ", expected ", ShapeText(std::span(shape.begin(), shape.size())));
  }
  TREADLE_RETURN_IF_ERROR(Fetch(*tensor));
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

// Factors far from these would leave float's range, and angles would be NaN.
absl::Status Checkpoint::CheckRope() const {
  constexpr double kSmallest = 1e-6, kLargest = 1e12;
  const int64_t rotated = config_.rope_dim;
  if (rotated % 2 != 0 || rotated < 2 || rotated > config_.head_dim) {
    return InvalidArgument(path_, ": ", rotated, " rotated elements of a head, expected an even ",
                           "number from 2 to ", config_.head_dim);
  }
  const RopeScaling scaling = config_.rope_scaling.value_or(RopeScaling());
  const std::pair<const char*, double> rows[] = {
      {"rope base", config_.rope_base},
      {"rope base of local layers",
       config_.local_rope_base == 0 ? config_.rope_base : config_.local_rope_base},
      {"rope scaling: linear factor", config_.rope_linear_factor},
      {"rope scaling: factor", scaling.factor},
      {"rope scaling: low_freq_factor", scaling.low_freq_factor},
      {"rope scaling: high_freq_factor", scaling.high_freq_factor}};
  for (const auto& [name, value] : rows) {
    if (!(value >= kSmallest && value <= kLargest)) {
      return InvalidArgument(path_, ": ", name, " is ", value, ", expected ", kSmallest, " to ",
                             kLargest);
    }
  }
  if (const auto& yarn = config_.yarn) {
    const auto refused = [&](const char* name, const auto& value, const auto&... expected) {
      return InvalidArgument(path_, ": rope scaling: ", name, " is ", value, ", expected ",
                             expected...);
    };
    if (!(yarn->factor >= 1 && yarn->factor <= kLargest)) {
      return refused("factor", yarn->factor, "1 to ", kLargest);
    }
    if (!(yarn->beta_slow >= kSmallest && yarn->beta_slow <= kLargest)) {
      return refused("beta_slow", yarn->beta_slow, kSmallest, " to ", kLargest);
    }
    if (!(yarn->beta_fast > yarn->beta_slow && yarn->beta_fast <= kLargest)) {
      return refused("beta_fast", yarn->beta_fast, "more than beta_slow, ", yarn->beta_slow);
    }
    if (!(yarn->attention_factor >= kSmallest && yarn->attention_factor <= kLargest)) {
      return refused("attention_factor", yarn->attention_factor, kSmallest, " to ", kLargest);
    }
    if (yarn->original_context < 1) {
      return refused("original context", yarn->original_context, "at least 1");
    }
    if (!(config_.rope_base > 1)) return refused("base", config_.rope_base, "more than 1");
  }
  if (const auto& rope = config_.long_rope) {
    std::vector<double> values = {rope->attention_factor};
    for (const auto* factors : {&rope->short_factors, &rope->long_factors}) {
      values.insert(values.end(), factors->begin(), factors->end());
      if (std::ssize(*factors) == rotated / 2) continue;
      return InvalidArgument(path_, ": rope scaling: ", factors->size(),
                             " factors, expected one for each of ", rotated / 2, " pairs");
    }
    for (const double value : values) {
      if (value >= kSmallest && value <= kLargest) continue;
      return InvalidArgument(path_, ": rope scaling: a factor is ", value, ", expected ", kSmallest,
                             " to ", kLargest);
    }
    if (rope->original_context < 1) {
      return InvalidArgument(path_, ": rope scaling: original context is ", rope->original_context,
                             ", expected at least 1");
    }
  }
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    return InvalidArgument(path_, ": rope scaling: high_freq_factor is ", scaling.high_freq_factor,
                           ", expected more than low_freq_factor, ", scaling.low_freq_factor);
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::CheckConsistency() const {
  const Architecture* const architecture = FindArchitecture(config_.architecture);
  if (architecture == nullptr) {
    return Unimplemented(path_, ": architecture ", Quoted(config_.architecture),
                         ", expected one of ", KnownArchitectures());
  }
  // Larger than any model; small enough that products of two and a half of them fit 64 bits.
  struct Row {
    const char* name;
    int64_t value;
    int64_t largest;
    int64_t least = 1;
  };
  const int64_t local = architecture->local_layers ? 1 : 0;
  const Row rows[] = {{"layers", config_.layers, 1 << 12},
                      {"hidden size", config_.hidden, 1 << 20},
                      {"heads", config_.heads, 1 << 14},
                      {"K/V heads", config_.kv_heads, 1 << 14},
                      {"head size", config_.head_dim, 1 << 12},
                      {"feed-forward size", config_.ffn_hidden, 1 << 22},
                      {"vocabulary", config_.vocab, 1 << 24},
                      {"context", config_.context, 1 << 24},
                      {"norms of a layer", config_.layer_norms, 2},
                      {"sliding window", config_.window, 1 << 24, local},
                      {"layers per global one", config_.global_every, 1 << 24, local},
                      {"global layers before others", config_.global_layers, 1 << 24, 0}};
  for (const Row& row : rows) {
    if (row.value < row.least || row.value > row.largest) {
      return InvalidArgument(path_, ": ", row.name, " is ", row.value, ", expected ", row.least,
                             " to ", row.largest);
    }
  }
  if (config_.heads % config_.kv_heads != 0) {
    return InvalidArgument(path_, ": ", config_.heads, " heads cannot share ", config_.kv_heads,
                           " K/V heads evenly");
  }
  if (!(config_.norm_epsilon >= 0 && config_.norm_epsilon < 1)) {
    return InvalidArgument(path_, ": norm epsilon is ", config_.norm_epsilon, ", expected 0 to 1");
  }
  if (!architecture->grouped &&
      (config_.kv_heads != config_.heads || config_.heads * config_.head_dim != config_.hidden)) {
    return InvalidArgument(path_, ": ", config_.heads, " heads of ", config_.head_dim, " and ",
                           config_.kv_heads, " K/V heads, expected as many, of hidden size ",
                           config_.hidden, " together");
  }
  constexpr int64_t kMostExperts = 1 << 12;
  const int64_t experts = config_.experts, each = config_.experts_per_token;
  if (architecture->experts && (experts < 1 || experts > kMostExperts)) {
    return InvalidArgument(path_, ": experts is ", experts, ", expected 1 to ", kMostExperts);
  }
  if (architecture->experts && (each < 1 || each > experts)) {
    return InvalidArgument(path_, ": experts per token is ", each, ", expected 1 to ", experts);
  }
  if (!architecture->experts && experts != 0) {
    return InvalidArgument(path_, ": experts is ", experts, ", expected none of ",
                           architecture->name);
  }
  if (architecture->rotary) TREADLE_RETURN_IF_ERROR(CheckRope());
  if (tokenizer_ && static_cast<int64_t>(tokenizer_->tokens.size()) > config_.vocab) {
    return InvalidArgument(path_, ": the tokenizer has ", tokenizer_->tokens.size(),
                           " tokens, the model's vocabulary ", config_.vocab);
  }
  return absl::OkStatus();
}

}  // namespace treadle
