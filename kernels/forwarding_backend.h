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
  DType low_rank_type() const override { return below_->low_rank_type(); }

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

#define TREADLE_FORWARD_OP(name, parameters, arguments) \
  void name parameters override { below_->name arguments; }
  TREADLE_BACKEND_OPS(TREADLE_FORWARD_OP)
#undef TREADLE_FORWARD_OP

 protected:
  Backend& below() { return *below_; }

 private:
  const std::unique_ptr<Backend> below_;
};

}  // namespace treadle
