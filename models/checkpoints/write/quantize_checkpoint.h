// Makes a checkpoint of another one, with matrices in other formats: `treadle quantize`.
//
//   OUT ends in .gguf    f32, f16, bf16, GGUF's blocks that have quantizers; read by llama.cpp too
//   any other OUT        a Hugging Face folder; dense types, nf4, fp4, int8 (read by transformers
//                        with bitsandbytes too), fp8 and k-bit types; of GGUF files, of Llamas only
//
// Treadle reads what it wrote as the same bits that `--weights` gives while loading, but for a
// matrix of Qwen 3.5's folders whose columns change places (gguf_states.h). The output says what it
// was made from: treadle.source, treadle.source_sha256, treadle.weights and treadle.version, in
// GGUF's metadata or the safetensors header's __metadata__.
//
// One tensor at a time is in memory. Nothing is under OUT's name until all of it is on disk.
// Thread safety: pure functions, but for the files.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/checkpoints/converted_tensor.h"
#include "models/checkpoints/weight_plan.h"
#include "models/checkpoints/write/importance.h"

namespace treadle {

struct QuantizeOptions {
  WeightPlan weights;
  std::string version;  // of this program
  int threads = 0;      // 0: one per CPU of this process
  bool errors = false;  // work out how far each matrix is from what it was made of
  // Written beside LLM.int8() matrices. Unset: what IN says, else 6.
  std::optional<float> outlier_threshold;
  const Importance* importance = nullptr;  // of columns, for OUT.gguf; null: all alike
  std::function<void(double)> progress;    // 0 to 1; may be empty
  std::function<bool()> cancelled;         // asked between tensors; may be empty
};

struct QuantizeReport {
  struct Matrix {
    std::string name;  // in the source
    std::string from;
    std::string to;
    int64_t n = 0;
    int64_t k = 0;
    double bits = 0;  // per weight, with constants
    ConversionError error;
  };
  std::vector<Matrix> matrices;  // that changed their format
  int64_t parameters = 0;        // of all tensors
  uint64_t source_bytes = 0;     // of tensors, with constants
  uint64_t output_bytes = 0;
  std::string source_sha256;
  std::vector<std::string> notices;
};

// Errors: IN cannot be read, a tensor that OUT cannot hold, a value that a format cannot hold, OUT
// exists or cannot be written, Cancelled.
absl::StatusOr<QuantizeReport> QuantizeCheckpoint(const std::string& in, const std::string& out,
                                                  const QuantizeOptions& options);

// A table, and one JSON object. Errors of matrices are left out unless they were worked out.
std::string QuantizeReportText(const QuantizeReport& report, bool errors);
std::string QuantizeReportJson(const QuantizeReport& report, bool errors);

}  // namespace treadle
