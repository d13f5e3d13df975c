#include "bench/kernel_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/reference/reference_backend.h"
#include "tests/support/op_cases.h"

namespace treadle {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The least that `body` returns in the time that a case has, after one call to warm up.
template <typename Body>
double BestSeconds(double budget, Body body) {
  body();
  double best = 1e30;
  const auto begin = Clock::now();
  int tries = 0;
  do {
    best = std::min(best, body());
    ++tries;
  } while (tries < 3 || SecondsSince(begin) < budget);
  return best;
}

// Copies of a matrix product's weights, more than the caches hold, multiplied one after the other.
class ColdMatMul {
 public:
  ColdMatMul(const OpCase& op_case, Backend& backend, int64_t cold_bytes) : backend_(backend) {
    x_.assign(static_cast<size_t>(op_case.rows * op_case.cols), 0.0f);
    for (size_t i = 0; i < x_.size(); ++i) x_[i] = static_cast<float>(i % 17) - 8.0f;
    input_ = DenseTensor(x_.data(), DType::kF32, op_case.rows, op_case.cols);
    std::vector<RandomMatrix> sources;
    int64_t bytes = 0;
    for (const int64_t n : op_case.outputs) {
      sources.push_back(MakeRandomMatrix(*op_case.format, n, op_case.cols, 1, op_case.scale_block));
      bytes += static_cast<int64_t>(sources.back().bytes.size());
      outputs_.emplace_back(static_cast<size_t>(op_case.rows * n), 0.0f);
    }
    for (int64_t total = 0; total < cold_bytes; total += bytes) {
      auto& copy = copies_.emplace_back();
      for (size_t i = 0; i < sources.size(); ++i) {
        auto packed = backend.Pack(sources[i].source);
        TREADLE_CHECK(packed.ok());
        packed_.push_back(*std::move(packed));
        const int64_t n = op_case.outputs[i];
        copy.push_back({packed_.back().get(), nullptr,
                        DenseTensor(outputs_[i].data(), DType::kF32, op_case.rows, n),
                        op_case.accumulate});
      }
    }
  }

  // Median time of one product: what interrupts a few of them does not show.
  double RunAll() {
    times_.clear();
    for (const auto& projections : copies_) {
      const auto start = Clock::now();
      backend_.MatMul(input_, projections);
      times_.push_back(SecondsSince(start));
    }
    std::nth_element(times_.begin(), times_.begin() + times_.size() / 2, times_.end());
    return times_[times_.size() / 2];
  }

 private:
  Backend& backend_;
  std::vector<float> x_;
  Tensor input_;
  std::vector<std::vector<float>> outputs_;
  std::vector<std::unique_ptr<PackedMatrix>> packed_;
  std::vector<std::vector<Projection>> copies_;
  std::vector<double> times_;
};

// Operations per second that the case could reach. A multiplication by a 16-bit activation is two
// by 8-bit ones. Which formats multiply integers: cpu_backend.h.
double Ceiling(const OpCase& op_case, ComputeMode compute, const MachinePeaks& peaks) {
  if (op_case.op != Op::kMatMul) return peaks.float_gigaops;
  const WeightFormat& format = *op_case.format;
  if (format.activations == ActivationPolicy::kRowInt8) return peaks.integer_gigaops;
  const bool small_codebook = format.apart() && format.code_bits <= 4;
  if (format.group > 0 && compute == ComputeMode::kInt8) return peaks.integer_gigaops;
  const bool words = format.group > 0 || small_codebook;
  const bool int16 = compute == ComputeMode::kInt16 || compute == ComputeMode::kAuto;
  return words && int16 ? peaks.integer_gigaops / 2 : peaks.float_gigaops;
}

KernelBenchRow Measure(const OpCase& op_case, Backend& backend, const MachinePeaks& peaks,
                       const KernelBenchOptions& options) {
  KernelBenchRow row;
  row.name = op_case.name;
  row.rows = op_case.rows;
  const auto run = Prepare(op_case, backend, 1);
  row.cold = op_case.op == Op::kMatMul && op_case.rows <= kColdRows && options.backend == "cpu";
  if (row.cold) {
    ColdMatMul cold(op_case, backend, options.cold_bytes);
    row.seconds = BestSeconds(options.seconds_per_case, [&] { return cold.RunAll(); });
  } else {
    row.seconds = BestSeconds(options.seconds_per_case, [&] {
      const auto start = Clock::now();
      run->Run();
      return SecondsSince(start);
    });
  }
  row.gigabytes_per_second = 1e-9 * run->bytes() / row.seconds;
  row.gigaops_per_second = 1e-9 * run->operations() / row.seconds;
  row.bandwidth_share = row.gigabytes_per_second / peaks.read_gigabytes;
  row.compute_share = row.gigaops_per_second / Ceiling(op_case, options.compute, peaks);
  return row;
}

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const KernelBenchOptions& options,
                                                     CpuIsa isa) {
  if (options.backend == "reference") return CreateReferenceBackend(options.compute);
  if (options.backend != "cpu") {
    return InvalidArgument("backend is '", options.backend, "', expected cpu or reference");
  }
  return CreateCpuBackend(
      {.threads = options.threads, .pin = true, .compute = options.compute, .isa = isa});
}

}  // namespace

absl::StatusOr<KernelBenchReport> RunKernelBench(const KernelBenchOptions& options) {
  CpuIsa isa;
  if (options.isa.has_value()) {
    isa = *options.isa;
  } else {
    TREADLE_ASSIGN_OR_RETURN(isa, ChooseIsa());
  }
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, MakeBackend(options, isa));
  std::vector<const OpCase*> cases;
  for (const OpCase& op_case : OpCases()) {
    if (op_case.bench && op_case.name.find(options.filter) != std::string::npos) {
      cases.push_back(&op_case);
    }
  }
  if (cases.empty()) return NotFound("no benchmark case has '", options.filter, "' in its name");
  KernelBenchReport report;
  report.description = backend->description();
  {
    const int threads = options.threads > 0 ? options.threads : UsableCpus();
    ThreadPool pool(threads, /*pin=*/true);
    pool.PinCaller();
    report.peaks = MeasurePeaks(pool, isa);
  }
  backend->BindThread();
  for (size_t i = 0; i < cases.size(); ++i) {
    report.rows.push_back(Measure(*cases[i], *backend, report.peaks, options));
    if (options.progress) {
      options.progress(static_cast<int64_t>(i) + 1, static_cast<int64_t>(cases.size()));
    }
  }
  return report;
}

std::string ToJson(const KernelBenchReport& report) {
  nlohmann::json json;
  json["backend"] = report.description;
  json["peaks"] = {{"read_gigabytes_per_second", report.peaks.read_gigabytes},
                   {"float_gigaops_per_second", report.peaks.float_gigaops},
                   {"integer_gigaops_per_second", report.peaks.integer_gigaops}};
  json["rows"] = nlohmann::json::array();
  for (const KernelBenchRow& row : report.rows) {
    json["rows"].push_back({{"name", row.name},
                            {"rows", row.rows},
                            {"cold", row.cold},
                            {"seconds", row.seconds},
                            {"gigabytes_per_second", row.gigabytes_per_second},
                            {"gigaops_per_second", row.gigaops_per_second},
                            {"bandwidth_share", row.bandwidth_share},
                            {"compute_share", row.compute_share}});
  }
  return json.dump(1);
}

std::string ToTable(const KernelBenchReport& report) {
  char line[256];
  std::snprintf(line, sizeof(line),
                "%s\nceilings: read %.1f GB/s, float %.0f GFLOP/s, 8-bit integer %.0f GOP/s\n",
                report.description.c_str(), report.peaks.read_gigabytes, report.peaks.float_gigaops,
                report.peaks.integer_gigaops);
  std::string table = line;
  std::snprintf(line, sizeof(line), "%-52s %6s %12s %8s %5s %9s %5s\n", "case", "memory", "us",
                "GB/s", "%", "GOP/s", "%");
  table += line;
  for (const KernelBenchRow& row : report.rows) {
    std::snprintf(line, sizeof(line), "%-52s %6s %12.2f %8.2f %5.0f %9.1f %5.0f\n",
                  row.name.c_str(), row.cold ? "cold" : "warm", 1e6 * row.seconds,
                  row.gigabytes_per_second, 100 * row.bandwidth_share, row.gigaops_per_second,
                  100 * row.compute_share);
    table += line;
  }
  return table;
}

}  // namespace treadle
