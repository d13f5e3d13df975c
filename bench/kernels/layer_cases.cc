#include "bench/kernels/layer_cases.h"

#include <utility>

#include "base/status.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/shared_conversion.h"

namespace treadle {
namespace {

struct ProductRow {
  const char* name;
  bool accumulate;
  std::vector<const char*> tensors;  // those that there are
};

}  // namespace

absl::StatusOr<std::vector<LayerProduct>> ProductsOfLayer(const Checkpoint& checkpoint) {
  const ProductRow rows[] = {{"qkv", false, {"attn_q", "attn_k", "attn_v", "attn_qkv"}},
                             {"out", true, {"attn_output"}},
                             {"up", false, {"ffn_gate", "ffn_up"}},
                             {"down", true, {"ffn_down"}}};
  std::vector<LayerProduct> products;
  for (const ProductRow& row : rows) {
    LayerProduct product = {.name = row.name, .accumulate = row.accumulate};
    for (const char* name : row.tensors) {
      const StoredTensor* tensor = checkpoint.Find(Str("blk.0.", name, ".weight"));
      if (tensor == nullptr) continue;
      product.values.push_back(DecodeVector(*tensor));
      product.outputs.push_back(tensor->shape[0]);
      product.k = tensor->shape[1];
    }
    const bool of_experts = checkpoint.config().experts > 0 && row.tensors[0][0] == 'f';
    if (of_experts) continue;  // ExpertLayer's
    if (product.values.empty()) {
      return InvalidArgument(checkpoint.path(), ": has no tensor 'blk.0.", row.tensors[0],
                             ".weight'");
    }
    products.push_back(std::move(product));
  }
  return products;
}

absl::StatusOr<std::vector<QuantizedMatrix>> Convert(const LayerProduct& product,
                                                     const QuantizeSpec& spec) {
  const ParallelFor parallel_for = SplitOverThreads(0);
  std::vector<QuantizedMatrix> matrices;
  for (size_t i = 0; i < product.values.size(); ++i) {
    TREADLE_ASSIGN_OR_RETURN(
        QuantizedMatrix matrix,
        Quantize(spec, product.values[i], product.outputs[i], product.k, parallel_for));
    matrices.push_back(std::move(matrix));
  }
  return matrices;
}

std::vector<OpCase> AttentionOfLayer(const ModelConfig& config) {
  constexpr int64_t kPageSize = 32;
  constexpr int64_t kContext = 1024;
  constexpr int64_t kPrompt = 2048;
  std::vector<OpCase> cases;
  const auto add = [&](Op op, int64_t requests, CaseSequence each) {
    OpCase c = {.op = op,
                .heads = config.heads,
                .kv = {config.kv_heads, config.head_dim, kPageSize, 0, DType::kF16},
                .rotary_dims = config.rope_dim,
                .sequences = std::vector<CaseSequence>(static_cast<size_t>(requests), each)};
    c.kv.latent_dim = config.latent_dim;
    c.rows = requests * each.rows;
    c.name =
        Str(Name(op), "/requests=", requests, "/rows=", each.rows, "/at=", each.first_position);
    cases.push_back(std::move(c));
  };
  for (const Op op : {Op::kAttention, Op::kRotateAndStoreKv}) {
    for (const int64_t requests : {1, 8, 32}) add(op, requests, {1, kContext - 1});
    add(op, 1, {kPrompt, 0});
  }
  return cases;
}

}  // namespace treadle
