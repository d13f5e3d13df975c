#include "models/checkpoints/weight_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/quoted.h"
#include "base/status.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/weight_mixtures.h"

namespace treadle {
namespace {

constexpr std::pair<Part, MatrixRole> kRoles[] = {
    {Part::kEmbedding, MatrixRole::kEmbedding}, {Part::kPositions, MatrixRole::kPositions},
    {Part::kHead, MatrixRole::kHead},           {Part::kRouter, MatrixRole::kRouter},
    {Part::kSharedRouter, MatrixRole::kRouter}, {Part::kConvolution, MatrixRole::kSmall}};

}  // namespace

MatrixRole RoleOf(std::string_view tensor) {
  for (const Architecture& architecture : Architectures()) {
    for (const auto kind : {Checkpoint::Kind::kGguf, Checkpoint::Kind::kHuggingFace}) {
      const TensorName name = ParseTensorName(architecture, kind, tensor);
      if (name.row == nullptr || name.suffix != ".weight") continue;
      for (const auto& [part, role] : kRoles) {
        if (part == name.row->part) return role;
      }
      if (name.row->columns == Extent::kNone) return MatrixRole::kSmall;
    }
  }
  return MatrixRole::kLayer;
}

absl::StatusOr<WeightPlan> WeightPlan::Parse(std::string_view text) {
  WeightPlan plan;
  plan.text_ = std::string(text);
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    const size_t equals = part.rfind('=');
    const bool named = equals != std::string_view::npos;
    const std::string_view format = named ? part.substr(equals + 1) : part;
    Entry entry;
    entry.text = std::string(part);
    if (named) entry.pattern = std::string(part.substr(0, equals));
    if (named && entry.pattern.empty()) {
      return InvalidArgument(Quoted(part), ": expected part of a tensor's name before '='");
    }
    if (!named) entry.mixture = FindMixture(format);
    if (entry.mixture == nullptr && format != "keep") {
      auto spec = ParseQuantizeSpec(format);
      if (!spec.ok()) {
        const std::string message(spec.status().message());  // names the format
        if (!named) return InvalidArgument(message, ", or a mixture: ", MixtureNames());
        return InvalidArgument(Quoted(part), ": ", message);
      }
      entry.spec = *std::move(spec);
    }
    plan.entries_.push_back(std::move(entry));
  }
  return plan;
}

bool WeightPlan::Matches(const Entry& entry, std::string_view tensor, bool tied_head) {
  const MatrixRole role = RoleOf(tensor);
  if (entry.mixture != nullptr && (role == MatrixRole::kEmbedding || role == MatrixRole::kHead)) {
    return true;
  }
  if (entry.pattern.empty()) return role == MatrixRole::kLayer;
  if (entry.pattern == "embedding" && role == MatrixRole::kEmbedding) return true;
  if (entry.pattern == "lm_head" &&
      (role == MatrixRole::kHead || (role == MatrixRole::kEmbedding && tied_head))) {
    return true;
  }
  if (entry.pattern == "experts" && tensor.find("_exps.") != tensor.npos) return true;
  return tensor.find(entry.pattern) != std::string_view::npos;
}

const WeightPlan::Entry* WeightPlan::Find(std::string_view tensor, bool tied_head) const {
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    if (Matches(*entry, tensor, tied_head)) return &*entry;
  }
  return nullptr;
}

const QuantizeSpec* WeightPlan::For(std::string_view tensor, bool tied_head) const {
  const Entry* const entry = Find(tensor, tied_head);
  return entry != nullptr && entry->spec ? &*entry->spec : nullptr;
}

const QuantizeSpec* WeightPlan::For(const StoredTensor& tensor,
                                    const Checkpoint& checkpoint) const {
  const ModelConfig& config = checkpoint.config();
  const Entry* const entry = Find(tensor.name, config.tied_head);
  if (entry == nullptr || (!entry->spec && entry->mixture == nullptr)) return nullptr;
  const bool turned = checkpoint.kind() == Checkpoint::Kind::kHuggingFace &&
                      TransposedInFolder(config, tensor) && !tensor.format->apart();
  const int64_t k = turned ? tensor.shape[0] : tensor.shape.back();
  if (entry->spec) return &Fitting(*entry->spec, k);
  const TensorName name =
      ParseTensorName(ArchitectureOf(config), checkpoint.kind(), tensor.name, &config);
  if (name.row == nullptr) return nullptr;
  const int64_t layer = name.layer.empty() ? 0 : std::stoll(std::string(name.layer));
  return &Fitting(SpecNamed(FormatIn(*entry->mixture, config, name.row->part, layer)), k);
}

absl::Status WeightPlan::CheckAgainst(const Checkpoint& checkpoint) const {
  for (const Entry& entry : entries_) {
    const auto answers = [&](const StoredTensor& tensor) {
      return tensor.shape.size() == 2 && Matches(entry, tensor.name, checkpoint.config().tied_head);
    };
    if (!std::ranges::any_of(checkpoint.tensors(), answers)) {
      return InvalidArgument(checkpoint.path(), ": --weights ", Quoted(entry.text),
                             " names none of its matrices");
    }
  }
  return absl::OkStatus();
}

uint64_t WeightPlan::EstimateBytes(const Checkpoint& checkpoint) const {
  uint64_t bytes = 0;
  for (const StoredTensor& tensor : checkpoint.tensors())
    bytes += EstimateBytes(tensor, checkpoint);
  return bytes;
}

uint64_t WeightPlan::EstimateBytes(const StoredTensor& tensor, const Checkpoint& checkpoint) const {
  const bool matrix = tensor.shape.size() == 2;
  const QuantizeSpec* to = matrix ? For(tensor, checkpoint) : nullptr;
  if (to == nullptr) return tensor.bytes + tensor.constant_bytes;
  // A scale in 32 bits for each block, row or matrix.
  const bool rows = to->format->code_bits == 8 && to->codebook == QuantizeSpec::Codebook::kFormat;
  const int64_t block = rows ? tensor.shape[1] : to->block;
  const double bits = to->format->bits_per_weight +
                      (to->format->apart() && block > 0 ? 32.0 / static_cast<double>(block) : 0);
  return static_cast<uint64_t>(bits / 8 * static_cast<double>(tensor.shape[0]) *
                               static_cast<double>(tensor.shape[1]));
}

std::string WeightPlan::Notice(const Checkpoint& checkpoint) const {
  int count = 0;
  std::set<std::string_view> from;
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    if (tensor.shape.size() != 2) continue;
    const QuantizeSpec* to = For(tensor, checkpoint);
    const bool dense = !tensor.format->apart() && tensor.format->block == 1;
    if (to == nullptr || dense || to->format == tensor.format) continue;
    ++count;
    from.insert(tensor.format->name);
  }
  if (count == 0) return "";
  std::string names;
  for (const std::string_view name : from) names += Str(names.empty() ? "" : ", ", name);
  return Str(count, " matrices are quantized already (", names, "); errors of both add up");
}

bool TransposedInFolder(const ModelConfig& config, const StoredTensor& tensor) {
  return ArchitectureOf(config).hugging_face_transposed && tensor.shape.size() == 2 &&
         RoleOf(tensor.name) == MatrixRole::kLayer;
}

}  // namespace treadle
