// The kernel benchmark: every op case that is flagged `bench`, or what a layer of a named model
// asks for, on one backend, beside the device's ceilings measured in the same run.
//
// Matrix products of up to kColdRows rows take their weights from memory, as in a real iteration:
// they rotate over copies that together exceed any cache. All times are the best of several tries,
// since other programs only ever add.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/choice.h"
#include "bench/kernels/machine_peaks.h"
#include "kernels/backend.h"
#include "kernels/cpu/isa.h"

namespace treadle {

enum class BenchDevice : uint8_t { kCpu, kCuda, kReference };
inline constexpr Choice<BenchDevice> kBenchDevices[] = {{"cpu", BenchDevice::kCpu},
                                                        {"cuda", BenchDevice::kCuda},
                                                        {"reference", BenchDevice::kReference}};

struct KernelBenchOptions {
  BenchDevice device = BenchDevice::kCpu;
  bool deterministic = false;  // on a GPU: CudaOptions::deterministic
  std::string filter;          // cases whose name contains it
  // Set: instead of the op cases, the products and the attention of a layer of this checkpoint
  // (layer_cases.h), with its matrices in these formats, for so many rows.
  std::string model = {};
  std::vector<std::string> formats = {"bf16", "int8", "nf4", "q8_0", "q4_0"};
  std::vector<int64_t> rows = {1, 8, 32, 2048};
  // On a GPU, with `model`: products of so many rows once more on the kernels for few rows, and on
  // those for many ("/few", "/many" after their names): CudaOptions::few_rows.
  std::vector<int64_t> crossover_rows = {};
  int threads = 0;
  std::optional<CpuIsa> isa = {};
  ComputeMode compute = ComputeMode::kAuto;
  double seconds_per_case = 0.2;
  int64_t cold_bytes = int64_t{600} << 20;
  std::function<void(double)> progress;  // 0 to 1; may be empty
};

struct KernelBenchRow {
  std::string name;
  int64_t rows = 0;
  bool cold = false;  // weights from memory
  double seconds = 0;
  double gigabytes_per_second = 0;
  double gigaops_per_second = 0;
  double bandwidth_share = 0;  // of the read ceiling; on a GPU of what copies reach
  // Share of the ceiling of its arithmetic: float, 8-bit, half of 8-bit (int16); on a GPU
  // cuBLASLt's rate: int8 for LLM.int8(), bf16 for all else.
  double compute_share = 0;
  // On a GPU, of a layer's products of LLM.int8(): what they take put together from cuBLASLt, which
  // takes no outliers out (int8_baseline.h), measured in turn with `seconds`. 0: not measured.
  double library_seconds = 0;
};

struct KernelBenchReport {
  std::string description;  // of the backend
  MachinePeaks peaks;
  std::vector<KernelBenchRow> rows;
  std::vector<std::string> notes = {};  // what could not be measured, and why
};

inline constexpr int64_t kColdRows = 8;

// Errors: an unknown or unusable device, an instruction set that cannot run here, no case matches
// the filter, a model or format that there is not.
absl::StatusOr<KernelBenchReport> RunKernelBench(const KernelBenchOptions& options);

std::string ToJson(const KernelBenchReport& report);
std::string ToTable(const KernelBenchReport& report);

}  // namespace treadle
