#include "models/checkpoints/write/quantize_checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <future>
#include <iterator>
#include <utility>

#include "base/mapped_file.h"
#include "base/sha256.h"
#include "base/status.h"
#include "models/checkpoints/write/checkpoint_output.h"
#include "models/parallel_split.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;

// The sum of the one file; if there are several, "name sum, name sum".
absl::StatusOr<std::string> SumOf(
    const std::vector<std::string>& files,
    const std::function<absl::StatusOr<std::string>(const std::string&)>& sum_of) {
  if (files.size() == 1) return sum_of(files[0]);
  std::string text;
  for (const std::string& file : files) {
    TREADLE_ASSIGN_OR_RETURN(const std::string sum, sum_of(file));
    text += Str(text.empty() ? "" : ", ", fs::path(file).filename().string(), " ", sum);
  }
  return text;
}

int64_t Elements(const StoredTensor& tensor) {
  int64_t elements = 1;
  for (const int64_t extent : tensor.shape) elements *= extent;
  return elements;
}

absl::StatusOr<std::unique_ptr<CheckpointOutput>> CreateOutput(const Checkpoint& source,
                                                               const OutputOptions& options,
                                                               const Provenance& provenance) {
  if (options.path.ends_with(".gguf")) return CreateGgufOutput(source, options, provenance);
  return CreateHuggingFaceOutput(source, options);
}

double BitsOf(const ConvertedTensor& tensor, int64_t elements) {
  QuantizedMatrix matrix;
  matrix.format = tensor.format;
  matrix.n = 1;
  matrix.k = elements;
  matrix.constants.scales.resize(tensor.constants.scales.size());
  matrix.constants.codebook = tensor.constants.codebook;
  matrix.nested = tensor.nested;
  return matrix.BitsPerWeight();
}

// Converts every tensor and adds it to the output.
absl::Status ConvertAll(const Checkpoint& source, const QuantizeOptions& options,
                        CheckpointOutput& output, QuantizeReport& report) {
  const ParallelFor parallel_for = SplitOverThreads(options.threads);
  uint64_t total = 0;
  for (const StoredTensor& tensor : source.tensors()) total += tensor.bytes;
  uint64_t done = 0;
  for (const StoredTensor& tensor : source.tensors()) {
    if (options.cancelled && options.cancelled()) return absl::CancelledError("interrupted");
    TREADLE_ASSIGN_OR_RETURN(const TensorTarget target, output.Target(tensor));
    done += tensor.bytes;
    if (target.name.empty()) continue;
    ConversionError error;
    auto converted = ConvertTensor(tensor, target, parallel_for, options.errors ? &error : nullptr);
    if (!converted.ok()) {
      return absl::Status(converted.status().code(),
                          Str(source.path(), ": ", std::string(converted.status().message())));
    }
    const int64_t elements = Elements(tensor);
    if (!converted->spec.empty() && converted->shape.size() == 2) {
      report.matrices.push_back({tensor.name, std::string(tensor.format->name), converted->spec,
                                 converted->shape[0], converted->shape[1],
                                 BitsOf(*converted, elements), error});
    }
    report.parameters += elements;
    report.source_bytes += tensor.bytes + tensor.constant_bytes;
    TREADLE_RETURN_IF_ERROR(output.Add(*converted));
    DropMappedPages(tensor.data, tensor.bytes);
    if (options.progress) options.progress(static_cast<double>(done) / static_cast<double>(total));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<QuantizeReport> QuantizeCheckpoint(const std::string& in, const std::string& out,
                                                  const QuantizeOptions& options) {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> source, Checkpoint::Open(in));
  TREADLE_RETURN_IF_ERROR(options.weights.CheckAgainst(*source));
  QuantizeReport report;
  if (std::string notice = options.weights.Notice(*source); !notice.empty()) {
    report.notices.push_back(std::move(notice));
  }
  fs::path name = fs::path(in).lexically_normal();
  if (name.filename().empty()) name = name.parent_path();
  Provenance provenance = {{"treadle.source", name.filename().string()},
                           {"treadle.version", options.version},
                           {"treadle.weights", options.weights.text()}};
  // As long as the sums, which are known only at the end.
  const auto placeholder = [](const std::string&) { return std::string(64, '?'); };
  TREADLE_ASSIGN_OR_RETURN(provenance["treadle.source_sha256"],
                           SumOf(source->weight_files(), placeholder));
  TREADLE_ASSIGN_OR_RETURN(
      const std::unique_ptr<CheckpointOutput> output,
      CreateOutput(*source, {out, options.weights, options.outlier_threshold}, provenance));
  // Meanwhile, on a thread of its own; its mapping is its own too.
  std::future<absl::StatusOr<std::string>> sum =
      std::async(std::launch::async, [&] { return SumOf(source->weight_files(), FileSha256); });
  TREADLE_RETURN_IF_ERROR(ConvertAll(*source, options, *output, report));
  TREADLE_ASSIGN_OR_RETURN(report.source_sha256, sum.get());
  provenance["treadle.source_sha256"] = report.source_sha256;
  TREADLE_ASSIGN_OR_RETURN(report.output_bytes, output->Finish(provenance));
  std::ranges::move(output->Notices(), std::back_inserter(report.notices));
  return report;
}

}  // namespace treadle
