// A model of one layer and sequences that it decodes, for tests of a backend's iterations.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/op_cases/op_cases.h"

namespace treadle::cuda {

// One attention layer and a head, on any backend: enough for every part of an announced batch to
// matter. Sequence s has page s.
class TinyModel {
 public:
  static constexpr int64_t kVocab = 48, kHidden = 32, kHeads = 2, kHeadDim = 16, kMaxRows = 16;
  static constexpr int64_t kPageSize = 16, kPages = 8;

  explicit TinyModel(Backend& backend)
      : backend_(backend), table_(Weights(kVocab, 1)), qkv_(Weights(kHidden, 2)) {
    layout_ = {.kv_heads = kHeads,
               .head_dim = kHeadDim,
               .page_size = kPageSize,
               .num_pages = kPages,
               .dtype = DType::kF32,
               .key_order = backend.key_order()};
    pages_ = backend.Allocate(static_cast<size_t>(kPages * layout_.PageBytes())).value();
    floats_ =
        backend.Allocate(sizeof(float) * (6 * kMaxRows * kHidden + kMaxRows * kVocab)).value();
  }

  // Inputs of RunGraph.
  absl::Status Forward(const BatchInput& batch, std::span<SampleResult> results) {
    const auto rows = static_cast<int64_t>(batch.token_ids.size());
    const Tensor hidden = Matrix(0, rows), q = Matrix(1, rows), k = Matrix(2, rows);
    const Tensor v = Matrix(3, rows), mixed = Matrix(4, rows);
    const auto outputs = static_cast<int64_t>(batch.output_rows.size());
    const KvView kv{.layout = layout_, .pages = pages_.data(), .sequences = batch.sequences};
    backend_.Embed(*table_, batch.token_ids, 0, false, hidden);
    backend_.Embed(*table_, batch.positions, 0, true, hidden);
    const std::array<Projection, 3> projections = {{{.weight = qkv_.get(), .out = q},
                                                    {.weight = qkv_.get(), .out = k},
                                                    {.weight = qkv_.get(), .out = v}}};
    backend_.MatMul(hidden, projections);
    backend_.RotateAndStoreKv(q, k, v, nullptr, kv);
    backend_.Attention(q, kv, 0.25f, mixed);
    backend_.SwiGlu(mixed, hidden, hidden);
    // In tiles of two rows, as long prompts have their heads.
    for (int64_t begin = 0; begin < outputs; begin += 2) {
      const int64_t count = std::min<int64_t>(2, outputs - begin);
      const Tensor gathered = Matrix(5, count);
      const Tensor logits = DenseTensor(Floats(6 * kMaxRows * kHidden), DType::kF32, count, kVocab);
      backend_.Gather(hidden, batch.output_rows.subspan(begin, count), gathered);
      const Projection head{.weight = table_.get(), .out = logits};
      backend_.MatMul(gathered, {&head, 1});
      backend_.Sample(logits, batch.samples.subspan(begin, count), results.subspan(begin, count));
    }
    return absl::OkStatus();
  }

 private:
  std::unique_ptr<PackedMatrix> Weights(int64_t n, uint64_t seed) {
    return backend_.Pack(MakeRandomMatrix(*FindWeightFormat("f32"), n, kHidden, seed).source)
        .value();
  }
  float* Floats(int64_t at) const { return reinterpret_cast<float*>(floats_.data()) + at; }
  Tensor Matrix(int64_t index, int64_t rows) const {
    return DenseTensor(Floats(index * kMaxRows * kHidden), DType::kF32, rows, kHidden);
  }

  Backend& backend_;
  std::unique_ptr<PackedMatrix> table_;
  std::unique_ptr<PackedMatrix> qkv_;
  KvLayout layout_;
  Buffer pages_;
  Buffer floats_;
};

// Decoding sequences, one row each, padded; each row's token is the one that was sampled before.
struct Decoding {
  Decoding(int64_t sequences, int64_t padded) : rows(sequences), token_ids(padded, -1) {
    positions.assign(padded, -1);
    output_rows.assign(padded, 0);
    samples.resize(padded);
    for (int32_t s = 0; s < sequences; ++s) {
      pages.push_back(s);
      parameters.push_back({.temperature = 0.8f, .seed = 100 + static_cast<uint64_t>(s)});
    }
    Place(0);
  }
  // All sequences at this position; after the first, tokens are those of the previous samples.
  void Place(int32_t position) {
    spans.clear();
    for (int32_t s = 0; s < rows; ++s) {
      token_ids[s] = position == 0 ? 5 * s + 1 : -2 - s;
      positions[s] = position;
      output_rows[s] = s;
      samples[s] = {.parameters = &parameters[s], .position = position + 1};
      spans.push_back({s, 1, position, &pages[s]});
    }
  }
  BatchInput batch(std::span<SampleResult> results) const {
    return {.token_ids = token_ids,
            .positions = positions,
            .sequences = spans,
            .output_rows = output_rows,
            .samples = samples,
            .results = results,
            .max_context = 16};
  }
  GraphKey key() const {
    const auto padded = static_cast<int64_t>(token_ids.size());
    return {.rows = padded, .context = 16, .output_rows = padded};
  }

  int64_t rows;
  std::vector<int32_t> token_ids, positions, output_rows, pages;
  std::vector<SequenceSpan> spans;
  std::vector<SamplingParameters> parameters;
  std::vector<SampleRow> samples;
};

}  // namespace treadle::cuda
