#include "bench/kernels/int8_baseline.h"

#include <map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bench/kernels/library_int8.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle {
namespace {

class CudaInt8Baseline final : public Int8Baseline {
 public:
  CudaInt8Baseline(std::unique_ptr<cuda::Device> device, bool accumulate)
      : device_(std::move(device)), accumulate_(accumulate) {}

  absl::Status Init(std::span<const MatrixSource> sources, const ColdProducts::Options& options) {
    const int64_t k = sources[0].k;
    int64_t n = 0;
    for (const MatrixSource& source : sources) n += source.n;
    device_->BindThread();
    TREADLE_ASSIGN_OR_RETURN(library_, cuda::LibraryInt8::Create(*device_, options.max_rows, n, k));
    const std::vector<float> x = ColdProducts::Activations(options.max_rows, k);
    TREADLE_ASSIGN_OR_RETURN(x_, device_->Allocate(x.size() * sizeof(float)));
    device_->CopyToDevice(x_.data(), x.data(), x.size() * sizeof(float));
    TREADLE_ASSIGN_OR_RETURN(
        out_, device_->Allocate(static_cast<size_t>(options.max_rows * n) * sizeof(float)));
    TREADLE_ASSIGN_OR_RETURN(weights_.emplace_back(), library_->Upload(sources));
    const int64_t copies = ColdProducts::Copies(options, static_cast<double>(n * (k + 4)));
    while (std::ssize(weights_) < copies) {
      TREADLE_ASSIGN_OR_RETURN(cuda::LibraryInt8Weights copy, library_->Copy(weights_.front()));
      weights_.push_back(std::move(copy));
    }
    return device_->Synchronize();
  }

  absl::StatusOr<double> Run(int64_t rows) override {
    device_->BindThread();
    std::unique_ptr<cuda::Graph>& graph = graphs_[rows];
    if (graph == nullptr) {
      TREADLE_ASSIGN_OR_RETURN(graph, Capture(rows));
    }
    // The device is busy with the first while the second is handed over.
    device_->Replay(*graph);
    device_->SetMark(0);
    device_->Replay(*graph);
    device_->SetMark(1);
    TREADLE_RETURN_IF_ERROR(device_->Synchronize());
    return device_->Seconds(0, 1) / static_cast<double>(weights_.size());
  }

 private:
  // A product with every copy of the weights.
  absl::StatusOr<std::unique_ptr<cuda::Graph>> Capture(int64_t rows) {
    // The library chooses its algorithm, and loads it, before anything is captured.
    bool taken = Multiply(rows, weights_.front());
    TREADLE_RETURN_IF_ERROR(device_->Synchronize());
    std::unique_ptr<cuda::Graph> graph;
    if (taken) {
      device_->BeginCapture();
      for (const cuda::LibraryInt8Weights& weights : weights_) {
        taken = Multiply(rows, weights) && taken;
      }
      TREADLE_ASSIGN_OR_RETURN(graph, device_->EndCapture());
    }
    if (taken) return graph;
    const cuda::LibraryInt8Weights& weights = weights_.front();
    return Unimplemented("cuBLASLt has no algorithm for ", rows, " rows of int8 times [", weights.n,
                         ", ", weights.k, "]");
  }

  bool Multiply(int64_t rows, const cuda::LibraryInt8Weights& weights) {
    return library_->Multiply(DenseTensor(x_.data(), DType::kF32, rows, weights.k), weights,
                              /*bias=*/nullptr, accumulate_,
                              DenseTensor(out_.data(), DType::kF32, rows, weights.n));
  }

  const std::unique_ptr<cuda::Device> device_;
  const bool accumulate_;
  std::unique_ptr<cuda::LibraryInt8> library_;
  Buffer x_;    // [max_rows, k] f32
  Buffer out_;  // [max_rows, n] f32
  std::vector<cuda::LibraryInt8Weights> weights_;
  std::map<int64_t, std::unique_ptr<cuda::Graph>> graphs_;  // of so many rows
};

}  // namespace

absl::StatusOr<std::unique_ptr<Int8Baseline>> Int8Baseline::Create(
    std::span<const MatrixSource> sources, const ColdProducts::Options& options) {
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<cuda::Device> device, cuda::Device::Open(0));
  auto baseline = std::make_unique<CudaInt8Baseline>(std::move(device), options.accumulate);
  TREADLE_RETURN_IF_ERROR(baseline->Init(sources, options));
  return baseline;
}

}  // namespace treadle
