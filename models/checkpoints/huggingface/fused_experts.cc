#include "models/checkpoints/huggingface/fused_experts.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/mapped_file.h"
#include "base/status.h"
#include "kernels/backend.h"
#include "models/checkpoints/huggingface/quantized_parts.h"

namespace treadle {
namespace {

constexpr int64_t kGroup = 32, kNibbleBytes = 16, kBlockBytes = 17;

struct Fused {
  std::string_view name;
  std::vector<std::string_view> parts;  // which have its rows by turns
};
const Fused kFused[] = {{"gate_up_proj", {"gate_proj", "up_proj"}}, {"down_proj", {"down_proj"}}};

// Granite's names.
constexpr std::pair<std::string_view, std::string_view> kOlderNames[] = {
    {"moe.input_linear.weight", "moe.experts.gate_up_proj"},
    {"moe.output_linear.weight", "moe.experts.down_proj"}};

// One part of one expert. Its row i is row i * step + first of the expert's `rows`.
struct ExpertPart {
  std::span<const std::byte> data = {};  // of the expert
  int64_t n = 0, k = 0;
  int64_t step = 1, first = 0;
  int64_t rows = 0;
};

// From [k, rows] of elements of `size` bytes; a vector is a matrix of one column.
std::vector<std::byte> Transposed(const ExpertPart& p, int64_t size) {
  std::vector<std::byte> out(static_cast<size_t>(p.n * p.k * size));
  for (int64_t column = 0; column < p.k; ++column) {
    for (int64_t row = 0; row < p.n; ++row) {
      const int64_t from = column * p.rows + row * p.step + p.first;
      std::memcpy(&out[static_cast<size_t>((row * p.k + column) * size)],
                  &p.data[static_cast<size_t>(from * size)], static_cast<size_t>(size));
    }
  }
  DropMappedPages(p.data.data(), p.data.size());
  return out;
}

// The scale, then values 0 to 15 in low nibbles and 16 to 31 in high ones.
std::vector<std::byte> Blocks(const ExpertPart& p, std::span<const std::byte> scales) {
  const int64_t groups = p.k / kGroup;
  std::vector<std::byte> out(static_cast<size_t>(p.n * groups * kBlockBytes));
  std::byte* to = out.data();
  for (int64_t i = 0; i < p.n; ++i) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t at = (i * p.step + p.first) * groups + group;
      const std::byte* from = p.data.data() + at * kNibbleBytes;
      const auto nibble = [&](int64_t value) {
        return from[value / 2] >> (value % 2 * 4) & std::byte{15};
      };
      *to++ = scales[static_cast<size_t>(at)];
      for (int64_t j = 0; j < kNibbleBytes; ++j) *to++ = nibble(j) | nibble(j + 16) << 4;
    }
  }
  DropMappedPages(p.data.data(), p.data.size());
  return out;
}

class Taker {
 public:
  explicit Taker(std::vector<SafetensorsEntry> entries) : entries_(std::move(entries)) {}

  absl::Status Take(std::string_view experts, const SafetensorsEntry& entry, const Fused& fused,
                    std::string_view kind, bool by_turns);
  absl::StatusOr<const SafetensorsEntry*> ScalesOf(const SafetensorsEntry& blocks);
  absl::Status TakeHalves(std::string_view experts, const SafetensorsEntry& entry,
                          const Fused& fused);

  QuantizedParts entries_;
  std::vector<StoredTensor> tensors_;
};

absl::StatusOr<const SafetensorsEntry*> Taker::ScalesOf(const SafetensorsEntry& blocks) {
  std::string name = blocks.name;
  name.replace(name.size() - std::string_view("blocks").size(), std::string::npos, "scales");
  TREADLE_ASSIGN_OR_RETURN(
      const SafetensorsEntry* scales,
      entries_.Require(name, "U8", static_cast<int64_t>(blocks.data.size()) / kNibbleBytes));
  const std::vector<int64_t> shape(blocks.shape.begin(), blocks.shape.end() - 1);
  if (scales->shape == shape) return scales;
  return EntryError(*scales, "has shape ", ShapeText(scales->shape), ", expected ",
                    ShapeText(shape));
}

// kind: what follows the fused matrices' name.
absl::Status Taker::Take(std::string_view experts, const SafetensorsEntry& entry,
                         const Fused& fused, std::string_view kind, bool by_turns) {
  const bool blocks = kind == "_blocks", bias = kind == "_bias";
  const auto count = std::ssize(fused.parts);
  const std::vector<int64_t>& shape = entry.shape;
  const WeightFormat* const format =
      blocks ? FindWeightFormat("mxfp4") : FindSafetensorsFormat(entry.dtype);
  if (format == nullptr || (blocks && entry.dtype != "U8")) {
    return EntryError(entry, "is ", entry.dtype, ", expected ", blocks ? "U8" : "F32, F16 or BF16");
  }
  const size_t dimensions = blocks ? 4 : bias ? 2 : 3;
  const size_t rows = bias || blocks ? 1 : 2;  // where shape has them
  const bool empty = std::ranges::any_of(shape, [](int64_t extent) { return extent < 1; });
  if (empty || shape.size() != dimensions || shape[0] > kMaxExperts || shape[rows] % count != 0 ||
      (blocks && shape[3] != kNibbleBytes)) {
    return EntryError(entry, "has shape ", ShapeText(shape), ", expected [experts, ",
                      blocks ? "rows, groups, 16"
                      : bias ? "rows"
                             : "columns, rows",
                      "], up to ", kMaxExperts, " experts", count > 1 ? " and even rows" : "");
  }
  std::span<const std::byte> scales;
  if (blocks) {
    TREADLE_ASSIGN_OR_RETURN(const SafetensorsEntry* found, ScalesOf(entry));
    scales = found->data;
  }
  entries_.Take(entry.name);
  ExpertPart part = {.n = shape[rows] / count, .k = 1, .rows = shape[rows]};
  if (by_turns) part.step = count;
  if (!bias) part.k = blocks ? shape[2] * kGroup : shape[1];
  const size_t each = entry.data.size() / static_cast<size_t>(shape[0]);
  const size_t scales_each = scales.size() / static_cast<size_t>(shape[0]);
  for (int64_t expert = 0; expert < shape[0]; ++expert) {
    part.data = entry.data.subspan(static_cast<size_t>(expert) * each, each);
    const auto own = scales.subspan(static_cast<size_t>(expert) * scales_each, scales_each);
    for (int64_t i = 0; i < count; ++i) {
      part.first = by_turns ? i : i * part.n;
      StoredTensor& tensor = tensors_.emplace_back();
      tensor.name = Str(experts, expert, ".", fused.parts[static_cast<size_t>(i)],
                        bias ? ".bias" : ".weight");
      tensor.format = format;
      tensor.shape = bias ? std::vector{part.n} : std::vector{part.n, part.k};
      tensor.bytes = static_cast<uint64_t>(format->MatrixBytes(part.n, part.k));
      if (blocks) {
        tensor.arranged = [part, own] { return Blocks(part, own); };
      } else {
        tensor.arranged = [part, format] { return Transposed(part, format->block_bytes); };
      }
    }
  }
  return absl::OkStatus();
}

// Experts [rows, columns] whose parts follow each other.
absl::Status Taker::TakeHalves(std::string_view experts, const SafetensorsEntry& entry,
                               const Fused& fused) {
  const auto count = std::ssize(fused.parts);
  const std::vector<int64_t>& shape = entry.shape;
  const WeightFormat* const format = FindSafetensorsFormat(entry.dtype);
  if (format == nullptr) {
    return EntryError(entry, "is ", entry.dtype, ", expected F32, F16 or BF16");
  }
  const bool empty = std::ranges::any_of(shape, [](int64_t extent) { return extent < 1; });
  if (empty || shape.size() != 3 || shape[0] > kMaxExperts || shape[1] % count != 0) {
    return EntryError(entry, "has shape ", ShapeText(shape),
                      ", expected [experts, rows, columns], up to ", kMaxExperts, " experts",
                      count > 1 ? " and even rows" : "");
  }
  entries_.Take(entry.name);
  const std::byte* data = entry.data.data();
  for (int64_t expert = 0; expert < shape[0]; ++expert) {
    for (const std::string_view part : fused.parts) {
      StoredTensor& tensor = tensors_.emplace_back();
      tensor.name = Str(experts, expert, ".", part, ".weight");
      tensor.format = format;
      tensor.shape = {shape[1] / count, shape[2]};
      tensor.bytes = static_cast<uint64_t>(format->MatrixBytes(tensor.shape[0], tensor.shape[1]));
      tensor.data = std::exchange(data, data + tensor.bytes);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<StoredTensor>> TakeFusedExperts(std::vector<SafetensorsEntry>& entries,
                                                           FusedExperts layout) {
  constexpr std::string_view kExperts = ".experts.";
  Taker taker(std::move(entries));
  for (const auto& [stored, entry] : taker.entries_.entries()) {
    std::string name = stored;
    for (const auto& [older, known] : kOlderNames) {
      if (name.ends_with(older)) name.replace(name.size() - older.size(), older.size(), known);
    }
    const size_t at = name.rfind(kExperts);
    if (at == name.npos) continue;
    const std::string_view experts = std::string_view(name).substr(0, at + kExperts.size());
    const std::string_view own = std::string_view(name).substr(experts.size());
    for (const Fused& fused : kFused) {
      if (layout == FusedExperts::kByHalves) {
        if (own == fused.name) {
          TREADLE_RETURN_IF_ERROR(taker.TakeHalves(experts, entry, fused));
        }
        continue;
      }
      for (const std::string_view kind : {"", "_bias", "_blocks"}) {
        if (own != Str(fused.name, kind)) continue;
        const bool by_turns = layout == FusedExperts::kByTurns;
        if (!by_turns && !kind.empty()) continue;
        TREADLE_RETURN_IF_ERROR(taker.Take(experts, entry, fused, kind, by_turns));
      }
    }
  }
  entries.clear();
  for (const auto& [name, entry] : taker.entries_.entries()) {
    if (taker.entries_.Taken(name)) continue;
    entries.push_back(entry);
    if (name.ends_with(".sinks")) entries.back().name += ".weight";
  }
  return std::move(taker.tensors_);
}

}  // namespace treadle
