// A backend that hands everything on to another one: what test doubles and simulations override
// some methods of.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "kernels/backend.h"

namespace treadle {

class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<Backend> below) : below_(std::move(below)) {}

  std::string_view name() const override { return below_->name(); }
  std::string description() const override { return below_->description(); }
  void BindThread() override { below_->BindThread(); }

  absl::StatusOr<Buffer> Allocate(size_t bytes) override { return below_->Allocate(bytes); }
  void CopyToDevice(void* device, const void* host, size_t bytes) override {
    below_->CopyToDevice(device, host, bytes);
  }
  void CopyToHost(void* host, const void* device, size_t bytes) override {
    below_->CopyToHost(host, device, bytes);
  }
  Staging* staging(StagingPlace place) override { return below_->staging(place); }
  absl::Status Synchronize() override { return below_->Synchronize(); }
  absl::Status Recover() override { return below_->Recover(); }
  KeyOrder key_order() const override { return below_->key_order(); }

  absl::Status Reserve(const BackendLimits& limits) override { return below_->Reserve(limits); }
  void BeginBatch(const BatchInput& batch) override { below_->BeginBatch(batch); }
  int64_t PaddedRows(int64_t rows) const override { return below_->PaddedRows(rows); }
  absl::Status RunGraph(const GraphKey& key, const std::function<absl::Status()>& ops) override {
    return below_->RunGraph(key, ops);
  }
  void ForgetGraphs() override { below_->ForgetGraphs(); }
  bool asynchronous() const override { return below_->asynchronous(); }
  void SetMark(int mark) override { below_->SetMark(mark); }
  absl::Status WaitForMark(int mark) override { return below_->WaitForMark(mark); }

  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override {
    return below_->Pack(source);
  }
  DType InputType(std::span<const PackedMatrix* const> weights) const override {
    return below_->InputType(weights);
  }

  void Embed(const PackedMatrix& table, std::span<const int32_t> ids, int32_t first_id,
             bool accumulate, Tensor out) override {
    below_->Embed(table, ids, first_id, accumulate, out);
  }
  void RmsNorm(Tensor x, const float* weight, float eps, Tensor out) override {
    below_->RmsNorm(x, weight, eps, out);
  }
  void LayerNorm(Tensor x, const float* weight, const float* bias, float eps, Tensor out) override {
    below_->LayerNorm(x, weight, bias, eps, out);
  }
  void MatMul(Tensor x, std::span<const Projection> projections) override {
    below_->MatMul(x, projections);
  }
  void RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary,
                        const KvView& kv) override {
    below_->RotateAndStoreKv(q, k, v, rotary, kv);
  }
  void Attention(Tensor q, const KvView& kv, float scale, Tensor out) override {
    below_->Attention(q, kv, scale, out);
  }
  void SwiGlu(Tensor gate, Tensor up, Tensor out) override { below_->SwiGlu(gate, up, out); }
  void Gelu(Tensor x, Tensor out) override { below_->Gelu(x, out); }
  void Gather(Tensor x, std::span<const int32_t> rows, Tensor out) override {
    below_->Gather(x, rows, out);
  }
  void Copy(Tensor x, Tensor out) override { below_->Copy(x, out); }
  void CopyPages(const KvLayout& layout, std::byte* pages,
                 std::span<const PageCopy> copies) override {
    below_->CopyPages(layout, pages, copies);
  }
  void Sample(Tensor logits, std::span<const SampleRow> rows,
              std::span<SampleResult> results) override {
    below_->Sample(logits, rows, results);
  }
  void SampleShard(Tensor logits, int32_t first_token, std::span<const SampleRow> rows,
                   std::span<ShardSample> shards) override {
    below_->SampleShard(logits, first_token, rows, shards);
  }

 protected:
  Backend& below() { return *below_; }

 private:
  const std::unique_ptr<Backend> below_;
};

}  // namespace treadle
