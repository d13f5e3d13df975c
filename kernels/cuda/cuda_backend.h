// The CUDA backend: the op set on one GPU.
//
// kAuto and every other ComputeMode mean the same here: activations enter products rounded to
// `dtype` (LLM.int8() matrices: quantized per row, as kernels/backend.h says), products and sums of
// them are f32. The K/V cache may be kF16, kBF16 or kF32.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace treadle {

struct CudaOptions {
  int device = 0;
  DType dtype = DType::kBF16;  // kBF16, kF16, kF32
  // Results that do not depend on neighbours (N1, N2), where the fastest library calls do not
  // promise it.
  bool deterministic = false;
  int pack_threads = 0;  // 0: one per CPU of this process
  // Products of up to so many rows run on the kernels for few rows, as far as these go; unset:
  // where each kind of weights is thought to cross over. For benchmarks that measure where it
  // should.
  std::optional<int64_t> few_rows = {};
};

// Errors: this build has no CUDA, no driver, a driver too old, no such device, one without code in
// this build; each says what was found and what was expected.
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaOptions& options);

struct CudaDevice {
  int ordinal = 0;
  std::string name;
  std::string bus_id;  // the same in every process of this machine
  size_t memory_bytes = 0;
};
// Devices that are new enough for CreateCudaBackend. None of them is opened, so nothing of their
// memory is taken. If there are none, `why` says what is missing.
std::vector<CudaDevice> CudaDevices(std::string* why);
// The bytes that are free on a device now. Opens it: from here on this process takes some of its
// memory. Errors: CreateCudaBackend's.
absl::StatusOr<size_t> CudaFreeBytes(int device);

}  // namespace treadle
