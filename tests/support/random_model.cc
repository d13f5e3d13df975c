#include "tests/support/random_model.h"

#include <algorithm>
#include <cmath>

#include "kernels/op_cases/op_cases.h"

namespace treadle {
namespace {

constexpr int64_t kLayers = 2;
constexpr int64_t kVocab = 97;
constexpr int64_t kHeads = 4;
constexpr int64_t kKvHeads = 2;
constexpr float kEpsilon = 1e-5f;
enum { kNormed, kQ, kK, kV, kAttended, kGate, kUp, kActivations };

Buffer Upload(Backend& backend, const std::vector<float>& values) {
  auto buffer = backend.Allocate(values.size() * sizeof(float)).value();
  backend.CopyToDevice(buffer.data(), values.data(), values.size() * sizeof(float));
  return std::move(buffer);
}

}  // namespace

RandomModel::RandomModel(Backend& backend, const WeightFormat& format, int64_t max_batch_tokens,
                         uint64_t seed)
    : backend_(backend), max_batch_tokens_(max_batch_tokens) {
  config_.architecture = "random";
  config_.layers = kLayers;
  config_.hidden = std::max<int64_t>(64, format.block);
  config_.heads = kHeads;
  config_.kv_heads = kKvHeads;
  config_.head_dim = config_.hidden / kHeads;
  config_.vocab = kVocab;
  config_.context = kContext;
  layers_ = {0, kLayers};
  vocab_ = {0, config_.vocab};
  kv_heads_ = config_.kv_heads;

  const int64_t hidden = config_.hidden;
  const auto pack = [&](int64_t n) {
    const RandomMatrix matrix = MakeRandomMatrix(format, n, hidden, seed++);
    return backend_.Pack(matrix.source).value();
  };
  embedding_ = pack(kVocab);
  const int64_t kv = kKvHeads * config_.head_dim;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    layers_packed_.push_back(
        {pack(hidden), pack(kv), pack(kv), pack(hidden), pack(hidden), pack(hidden), pack(hidden)});
  }
  norm_ = Upload(backend_, std::vector<float>(hidden, 1.0f));
  const int64_t half = config_.head_dim / 2;
  std::vector<float> rotary(2 * kContext * half);
  for (int64_t position = 0; position < kContext; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = position * std::pow(10000.0, -static_cast<double>(i) / half);
      rotary[position * half + i] = static_cast<float>(std::cos(angle));
      rotary[(kContext + position) * half + i] = static_cast<float>(std::sin(angle));
    }
  }
  rotary_ = Upload(backend_, rotary);
  for (int i = 0; i < kActivations; ++i) {
    activations_.push_back(Upload(backend_, std::vector<float>(max_batch_tokens * hidden)));
  }
}

Tensor RandomModel::Activation(int index, int64_t rows, int64_t cols) {
  TREADLE_CHECK(rows <= max_batch_tokens_ && cols <= config_.hidden);
  return DenseTensor(activations_[index].data(), DType::kF32, rows, cols);
}

absl::Status RandomModel::Forward(const Batch& batch, const KvPages& kv, Communicator* ranks,
                                  Tensor hidden) {
  TREADLE_CHECK(ranks == nullptr);
  const int64_t rows = hidden.rows;
  const int64_t kv_cols = kKvHeads * config_.head_dim;
  const float* norm = reinterpret_cast<const float*>(norm_.data());
  const float* cos = reinterpret_cast<const float*>(rotary_.data());
  const int64_t half = config_.head_dim / 2;
  const RotaryTable rotary{cos, cos + kContext * half, half, kContext};
  const float scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  // All matrices of layers have one format and one number of inputs.
  const PackedMatrix* const weight = layers_packed_[0].q.get();
  const DType input = backend_.InputType({&weight, 1});
  const auto as_input = [input](const Tensor& tensor) {
    return DenseTensor(tensor.data, input, tensor.rows, tensor.cols);
  };
  const Tensor normed = as_input(Activation(kNormed, rows, config_.hidden));
  const Tensor q = Activation(kQ, rows, config_.hidden);
  const Tensor k = Activation(kK, rows, kv_cols);
  const Tensor v = Activation(kV, rows, kv_cols);
  const Tensor attended = as_input(Activation(kAttended, rows, config_.hidden));
  const Tensor gate = Activation(kGate, rows, config_.hidden);
  const Tensor up = Activation(kUp, rows, config_.hidden);
  const Tensor inner = input == DType::kF32 ? gate : normed;

  backend_.Embed(*embedding_, batch.token_ids, 0, false, hidden);
  for (int64_t i = 0; i < kLayers; ++i) {
    const Layer& layer = layers_packed_[i];
    const KvView view{kv.layout, kv.layers[i], batch.sequences};
    backend_.RmsNorm(hidden, norm, kEpsilon, /*accumulate=*/false, normed);
    const Projection qkv[] = {{layer.q.get(), nullptr, q, false},
                              {layer.k.get(), nullptr, k, false},
                              {layer.v.get(), nullptr, v, false}};
    backend_.MatMul(normed, qkv);
    backend_.RotateAndStoreKv(q, k, v, &rotary, view);
    backend_.Attention(q, view, scale, attended);
    const Projection out[] = {{layer.out.get(), nullptr, hidden, true}};
    backend_.MatMul(attended, out);
    backend_.RmsNorm(hidden, norm, kEpsilon, /*accumulate=*/false, normed);
    const Projection ffn[] = {{layer.gate.get(), nullptr, gate, false},
                              {layer.up.get(), nullptr, up, false}};
    backend_.MatMul(normed, ffn);
    backend_.SwiGlu(gate, up, inner);
    const Projection down[] = {{layer.down.get(), nullptr, hidden, true}};
    backend_.MatMul(inner, down);
  }
  return absl::OkStatus();
}

void RandomModel::Normalize(Tensor hidden) {
  backend_.RmsNorm(hidden, reinterpret_cast<const float*>(norm_.data()), kEpsilon,
                   /*accumulate=*/false, hidden);
}

void RandomModel::Head(Tensor hidden, Tensor logits, std::span<const Adapter* const>) {
  Normalize(hidden);
  const Projection head[] = {{embedding_.get(), nullptr, logits, false}};
  backend_.MatMul(hidden, head);
}

}  // namespace treadle
