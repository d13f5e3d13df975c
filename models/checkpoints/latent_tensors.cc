#include "models/checkpoints/latent_tensors.h"

#include <cstring>
#include <utility>

#include "base/status.h"
#include "kernels/dtype.h"

namespace treadle {
namespace {

// The part of a head's rows that a new matrix is made of.
struct HeadPart {
  int64_t heads = 0;
  int64_t each = 0;   // rows of a head in the file
  int64_t first = 0;  // of them
  int64_t count = 0;
  bool transposed = false;
};

// Rows [first, first + count) of the matrix, [count, k] of elements of `bytes` bytes: as they are
// stored, or of a quantized one in f16.
std::vector<std::byte> RowsOf(const StoredTensor& tensor, const MatrixSource& source, int64_t first,
                              int64_t count, bool dense) {
  const int64_t k = source.k;
  if (dense) {
    const int64_t row_bytes = tensor.format->RowBytes(k);
    const std::byte* const begin = source.data + first * row_bytes;
    return {begin, begin + count * row_bytes};
  }
  std::vector<float> values(static_cast<size_t>(k));
  std::vector<std::byte> rows(static_cast<size_t>(count * k) * sizeof(Half));
  for (int64_t row = 0; row < count; ++row) {
    DecodeSourceRow(source, first + row, values.data());
    for (int64_t i = 0; i < k; ++i) {
      StoreElement(DType::kF16, values[static_cast<size_t>(i)], rows.data(), row * k + i);
    }
  }
  return rows;
}

std::vector<std::byte> Arranged(const StoredTensor& tensor, const HeadPart& part, size_t bytes,
                                bool dense) {
  const int64_t n = tensor.shape[0], k = tensor.shape[1];
  MatrixConstants constants;
  const auto source = SourceOf(tensor, n, k, constants);
  TREADLE_CHECK(source.ok());  // they could be read when the checkpoint was opened
  std::vector<std::byte> made;
  for (int64_t head = 0; head < part.heads; ++head) {
    const std::vector<std::byte> rows =
        RowsOf(tensor, *source, head * part.each + part.first, part.count, dense);
    if (!part.transposed) {
      made.insert(made.end(), rows.begin(), rows.end());
      continue;
    }
    for (int64_t column = 0; column < k; ++column) {
      for (int64_t row = 0; row < part.count; ++row) {
        const std::byte* const from = rows.data() + static_cast<size_t>(row * k + column) * bytes;
        made.insert(made.end(), from, from + bytes);
      }
    }
  }
  return made;
}

}  // namespace

absl::StatusOr<std::vector<StoredTensor>> WithLatentsApart(std::vector<StoredTensor> tensors,
                                                           const ModelConfig& config,
                                                           Container kind) {
  const bool gguf = kind == Container::kGguf;
  const std::string fused = gguf ? ".attn_kv_b.weight" : ".kv_b_proj.weight";
  const int64_t each = config.unrotated_dim + config.value_dim;
  std::vector<StoredTensor> out;
  for (StoredTensor& tensor : tensors) {
    if (!tensor.name.ends_with(fused) ||
        tensor.shape != std::vector{config.heads * each, config.latent_dim}) {
      out.push_back(std::move(tensor));
      continue;
    }
    const bool dense = !tensor.format->apart() && tensor.format->block == 1;
    if (tensor.format->apart()) TREADLE_RETURN_IF_ERROR(tensor.constants().status());
    const WeightFormat* const format = dense ? tensor.format : FindWeightFormat("f16");
    const auto bytes = static_cast<size_t>(format->block_bytes);
    const std::string before = tensor.name.substr(0, tensor.name.size() - fused.size());
    const auto split = [&](const char* name, const HeadPart& part) {
      StoredTensor& made = out.emplace_back();
      made.name = Str(before, name);
      made.format = format;
      made.shape = {part.heads * part.count, config.latent_dim};
      if (part.transposed) made.shape = {part.heads * config.latent_dim, part.count};
      made.bytes = static_cast<uint64_t>(made.Elements()) * bytes;
      made.arranged = [tensor, part, bytes, dense] { return Arranged(tensor, part, bytes, dense); };
    };
    split(gguf ? ".attn_k_b.weight" : ".k_b_proj.weight",
          {config.heads, each, 0, config.unrotated_dim, /*transposed=*/true});
    split(gguf ? ".attn_v_b.weight" : ".v_b_proj.weight",
          {config.heads, each, config.unrotated_dim, config.value_dim});
  }
  return out;
}

}  // namespace treadle
