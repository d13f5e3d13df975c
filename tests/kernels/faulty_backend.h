// The reference with one fault in its RmsNorm, Attention or CopyPages: what the op-case checks must
// notice.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "kernels/reference/reference_backend.h"

namespace treadle {

// Each member, if set, runs after the reference's op.
struct Faults {
  std::function<void(Tensor x, Tensor out)> rms_norm = {};
  std::function<void(const KvView& kv, Tensor out)> attention = {};
  std::function<void(const KvLayout& layout, std::byte* pages)> copy_pages = {};
};

class FaultyBackend final : public Backend {
 public:
  explicit FaultyBackend(Faults faults) : faults_(std::move(faults)) {}

  std::string_view name() const override { return "faulty"; }
  std::string description() const override { return "faulty"; }
  void BindThread() override {}
  absl::StatusOr<Buffer> Allocate(size_t bytes) override { return good_->Allocate(bytes); }
  void CopyToDevice(void* device, const void* host, size_t bytes) override {
    good_->CopyToDevice(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, size_t bytes) override {
    good_->CopyToHost(host, device, bytes);
  }
  void Synchronize() override {}
  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override {
    return good_->Pack(source);
  }
  void Embed(const PackedMatrix& table, std::span<const int32_t> ids, bool accumulate,
             Tensor out) override {
    good_->Embed(table, ids, accumulate, out);
  }
  void RmsNorm(Tensor x, const float* weight, float eps, Tensor out) override {
    good_->RmsNorm(x, weight, eps, out);
    if (faults_.rms_norm) faults_.rms_norm(x, out);
  }
  void LayerNorm(Tensor x, const float* weight, const float* bias, float eps, Tensor out) override {
    good_->LayerNorm(x, weight, bias, eps, out);
  }
  void MatMul(Tensor x, std::span<const Projection> projections) override {
    good_->MatMul(x, projections);
  }
  void RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                        const KvView& kv) override {
    good_->RotateAndStoreKv(q, k, v, rotary, kv);
  }
  void Attention(Tensor q, const KvView& kv, float scale, Tensor out) override {
    good_->Attention(q, kv, scale, out);
    if (faults_.attention) faults_.attention(kv, out);
  }
  void SwiGlu(Tensor gate, Tensor up, Tensor out) override { good_->SwiGlu(gate, up, out); }
  void Gelu(Tensor x) override { good_->Gelu(x); }
  void Gather(Tensor x, std::span<const int32_t> rows, Tensor out) override {
    good_->Gather(x, rows, out);
  }
  void CopyPages(const KvLayout& layout, std::byte* pages,
                 std::span<const PageCopy> copies) override {
    good_->CopyPages(layout, pages, copies);
    if (faults_.copy_pages) faults_.copy_pages(layout, pages);
  }
  void Sample(Tensor logits, std::span<const SampleRow> rows,
              std::span<SampleResult> results) override {
    good_->Sample(logits, rows, results);
  }
  void SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                   std::span<ShardSample> shards) override {
    good_->SampleShard(logits, first_token, rows, shards);
  }

 private:
  const std::unique_ptr<Backend> good_ = CreateReferenceBackend();
  const Faults faults_;
};

}  // namespace treadle
