#include "models/checkpoints/write/quantize_checkpoint.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <future>
#include <iomanip>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "base/mapped_file.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/utf8.h"
#include "models/checkpoints/shared_conversion.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;

// The sum of the one file; if there are several, "name sum, name sum".
absl::StatusOr<std::string> SumOf(
    const std::vector<std::shared_ptr<const MappedFile>>& files,
    const std::function<absl::StatusOr<std::string>(const MappedFile&)>& sum_of) {
  if (files.size() == 1) return sum_of(*files[0]);
  std::string text;
  for (const auto& file : files) {
    TREADLE_ASSIGN_OR_RETURN(const std::string sum, sum_of(*file));
    text += Str(text.empty() ? "" : ", ", fs::path(file->path()).filename().string(), " ", sum);
  }
  return text;
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
    const int64_t elements = tensor.Elements();
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

double BitsPerParameter(uint64_t bytes, int64_t parameters) {
  return 8.0 * static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(parameters, 1));
}

}  // namespace

absl::StatusOr<QuantizeReport> QuantizeCheckpoint(const std::string& in, const std::string& out,
                                                  const QuantizeOptions& options) {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> source, Checkpoint::Open(in));
  TREADLE_RETURN_IF_ERROR(options.weights.CheckAgainst(*source));
  const bool to_gguf = out.ends_with(".gguf");
  if (source->config().HasStates() && !to_gguf && source->kind() == Checkpoint::Kind::kGguf) {
    return Unimplemented(in, ": layers of ", source->config().architecture,
                         " keep a state, of which a .gguf file becomes no folder; expected ", out,
                         " to be a .gguf file");
  }
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
  const auto placeholder = [](const MappedFile&) { return std::string(64, '?'); };
  TREADLE_ASSIGN_OR_RETURN(provenance["treadle.source_sha256"],
                           SumOf(source->weight_files(), placeholder));
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointOutput> output,
                           to_gguf ? CreateGgufOutput(*source, out, options, provenance)
                                   : CreateHuggingFaceOutput(*source, out, options));
  // Meanwhile, on a thread of its own.
  std::atomic<bool> over = false;  // nobody waits for the sum any more
  const auto sum_of = [&](const MappedFile& file) {
    return file.Sum([&] { return over || (options.cancelled && options.cancelled()); });
  };
  std::future<absl::StatusOr<std::string>> sum =
      std::async(std::launch::async, [&] { return SumOf(source->weight_files(), sum_of); });
  absl::Status converted = ConvertAll(*source, options, *output, report);
  if (const absl::Status unchanged = source->CheckUnchanged(); !unchanged.ok()) {
    converted = unchanged;  // it would be why
  }
  over = !converted.ok();
  TREADLE_RETURN_IF_ERROR(converted);
  TREADLE_ASSIGN_OR_RETURN(report.source_sha256, sum.get());
  provenance["treadle.source_sha256"] = report.source_sha256;
  TREADLE_ASSIGN_OR_RETURN(report.output_bytes, output->Finish(provenance));
  std::ranges::move(output->Notices(), std::back_inserter(report.notices));
  return report;
}

std::string QuantizeReportText(const QuantizeReport& report, bool errors) {
  std::ostringstream out;
  size_t width = 6;
  for (const QuantizeReport::Matrix& matrix : report.matrices) {
    width = std::max(width, Printable(matrix.name).size());
  }
  const auto cell = [&out](int columns, const auto& value) {
    out << "  " << std::right << std::setw(columns) << value;
  };
  const auto number = [](double value, int digits) {
    std::ostringstream text;
    text << std::setprecision(digits) << value;
    return text.str();
  };
  out << std::left << std::setw(static_cast<int>(width)) << "matrix";
  cell(13, "shape");
  cell(8, "from");
  cell(18, "to");
  cell(7, "bits");
  if (errors) {
    cell(12, "mean error");
    cell(10, "relative");
    cell(10, "worst");
  }
  out << '\n';
  for (const QuantizeReport::Matrix& matrix : report.matrices) {
    out << std::left << std::setw(static_cast<int>(width)) << Printable(matrix.name);
    cell(13, Str(matrix.n, "x", matrix.k));
    cell(8, matrix.from);
    cell(18, matrix.to);
    cell(7, number(matrix.bits, 4));
    if (errors) {
      cell(12, number(matrix.error.mean_absolute, 4));
      cell(10, number(matrix.error.relative, 4));
      cell(10, number(matrix.error.worst, 4));
    }
    out << '\n';
  }
  out << "all tensors: " << report.parameters << " parameters, " << report.source_bytes << " -> "
      << report.output_bytes << " bytes, "
      << number(BitsPerParameter(report.source_bytes, report.parameters), 4) << " -> "
      << number(BitsPerParameter(report.output_bytes, report.parameters), 4)
      << " bits per parameter with constants\n";
  return out.str();
}

std::string QuantizeReportJson(const QuantizeReport& report, bool errors) {
  using Json = nlohmann::ordered_json;
  Json json = {{"parameters", report.parameters},
               {"source_bytes", report.source_bytes},
               {"output_bytes", report.output_bytes},
               {"bits_per_parameter", BitsPerParameter(report.output_bytes, report.parameters)},
               {"source_sha256", report.source_sha256},
               {"notices", report.notices},
               {"matrices", Json::array()}};
  for (const QuantizeReport::Matrix& matrix : report.matrices) {
    Json row = {{"name", matrix.name},
                {"from", matrix.from},
                {"to", matrix.to},
                {"shape", {matrix.n, matrix.k}},
                {"bits_per_weight", matrix.bits}};
    if (errors) {
      row["mean_absolute_error"] = matrix.error.mean_absolute;
      row["relative_error"] = matrix.error.relative;
      row["worst_error"] = matrix.error.worst;
    }
    json["matrices"].push_back(std::move(row));
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace treadle
