// The CUDA backend's ops, and what they work with. Contracts: kernels/backend.h. An op on rows is
// defined beside its kernel; those that need a batch's description or scratch memory, in
// cuda_ops.cc, as launches that ops.h declares.
//
// Failures are kept: the first one makes ops do nothing until Recover.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/runtime/batch_upload.h"
#include "kernels/cuda/runtime/result_delivery.h"

namespace treadle::cuda {

class CudaOps : public Backend {
 public:
  CudaOps(std::unique_ptr<Device> device, int upload_mark, const CudaOptions& options)
      : options_(options),
        device_(std::move(device)),
        batch_(*device_, upload_mark),
        results_(*device_) {}

  Device& device() { return *device_; }
  KeyOrder key_order() const override { return KeyOrder::kByPosition; }
  DType low_rank_type() const override {
    return options_.dtype == DType::kF32 ? DType::kF32 : DType::kF16;
  }

  TREADLE_BACKEND_OPS(TREADLE_OVERRIDE_OP)

 protected:
  // Whether an op may do something.
  bool Ready();
  void Keep(const absl::Status& status) {
    if (status_.ok()) status_ = status;
  }

  // Changes whenever a device address that graphs have kept does.
  int64_t Generation() const { return generation_ + batch_.generation() + results_.generation(); }

  absl::Status ReserveProducts(int64_t rows, int64_t k, int64_t n);
  absl::Status ReserveScratch(size_t bytes);
  // The last samples stay.
  absl::Status ReserveLastSamples(int64_t rows);

  const CudaOptions options_;
  const std::unique_ptr<Device> device_;
  std::unique_ptr<MatMuls> matmuls_;
  AnnouncedBatch batch_;
  bool in_graph_ = false;  // the ops of a RunGraph run, or are captured
  ResultDelivery results_;
  absl::Status status_;

 private:
  // MatMulInput::owners. Only graphs have padding, and in them a product of as many rows as the
  // batch has is about the batch's rows.
  const int32_t* OwnersOf(int64_t first, int64_t rows) const;
  struct SamplePlace {
    int64_t first = 0;  // of the batch's samples
    std::byte* results = nullptr;
  };

  // The batch on the device with these sequences, if there is anything to do and it can be done.
  std::optional<DeviceBatch> Upload(const KvView& kv, int64_t rows);
  // The beginning of both kinds of sampling. Failures are kept.
  SamplePlace BeginSample(Tensor logits, std::span<const SampleRow> rows, int64_t tokens,
                          std::span<std::byte> results);
  std::span<std::byte> Scratch() const { return {scratch_.data(), scratch_.bytes()}; }
  int32_t* LastSamples() const { return reinterpret_cast<int32_t*>(last_samples_.data()); }

  Buffer scratch_;
  Buffer last_samples_;  // int32
  int64_t generation_ = 0;
};

}  // namespace treadle::cuda
