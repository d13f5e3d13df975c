#include <algorithm>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/status.h"
#include "models/checkpoints/write/quantize_checkpoint.h"

namespace treadle {
namespace {

double BitsPerParameter(uint64_t bytes, int64_t parameters) {
  return 8.0 * static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(parameters, 1));
}

}  // namespace

std::string QuantizeReportText(const QuantizeReport& report, bool errors) {
  std::ostringstream out;
  size_t width = 6;
  for (const QuantizeReport::Matrix& matrix : report.matrices) {
    width = std::max(width, matrix.name.size());
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
    out << std::left << std::setw(static_cast<int>(width)) << matrix.name;
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
