#include "bench/kernels/kernel_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "bench/kernels/cold_products.h"
#include "bench/kernels/expert_layer.h"
#include "bench/kernels/int8_baseline.h"
#include "bench/kernels/layer_cases.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/op_cases/op_cases.h"
#include "kernels/reference/reference_backend.h"

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

// Operations per second that a case could reach. A multiplication by a 16-bit activation is two
// by 8-bit ones. Which formats multiply integers: cpu_backend.h.
double Ceiling(const WeightFormat* format, const KernelBenchOptions& options,
               const MachinePeaks& peaks) {
  if (format == nullptr || peaks.integer_gigaops == 0) return peaks.float_gigaops;
  if (format->activations == ActivationPolicy::kRowInt8) return peaks.integer_gigaops;
  if (options.device == BenchDevice::kCuda) return peaks.float_gigaops;
  if (options.compute == ComputeMode::kBf16 && peaks.tiles) return peaks.integer_gigaops / 2;
  const ComputeMode compute = options.compute == ComputeMode::kAuto ? kCpuAuto : options.compute;
  if (format->group > 0 && compute == ComputeMode::kInt8) return peaks.integer_gigaops;
  const bool words = format->group > 0 || format->apart();
  const bool planes = compute == ComputeMode::kInt12 || compute == ComputeMode::kInt16;
  return words && planes ? peaks.integer_gigaops / 2 : peaks.float_gigaops;
}

// Measures cases on one backend, one after the other.
class Measurement {
 public:
  Measurement(const KernelBenchOptions& options, Backend& backend, KernelBenchReport& report)
      : options_(options),
        backend_(backend),
        report_(report),
        asynchronous_(options.device == BenchDevice::kCuda) {}

  Backend& backend() { return backend_; }

  void Run(const OpCase& op_case) {
    const auto run = PrepareAsModels(op_case);
    const WeightFormat* format = op_case.op == Op::kMatMul ? op_case.format : nullptr;
    Add({.name = op_case.name, .rows = op_case.rows, .seconds = Seconds([&] { run->Run(); })},
        run->bytes(), run->operations(), format);
  }

  // One call for each row, as if it were alone: what batching of different rows saves (ORCA,
  // section 5).
  void RunRowByRow(const OpCase& op_case) {
    const auto run = PrepareAsModels(op_case);
    const double seconds = Seconds([&] {
      for (int64_t row = 0; row < op_case.rows; ++row) run->RunRows(row, 1);
    });
    Add({.name = op_case.name + "/one by one", .rows = op_case.rows, .seconds = seconds},
        run->bytes(), run->operations(), nullptr);
  }

  // Weights from memory, for each of `rows`. beside_library: LLM.int8() in turn with its baseline.
  void RunCold(std::span<const MatrixSource> sources, bool accumulate,
               std::span<const int64_t> rows, bool beside_library,
               const std::function<std::string(int64_t rows)>& name) {
    const ColdProducts::Options cold = {.max_rows = std::ranges::max(rows),
                                        .accumulate = accumulate,
                                        .cold_bytes = options_.cold_bytes,
                                        .asynchronous = asynchronous_};
    ColdProducts products(backend_, sources, cold);
    std::unique_ptr<Int8Baseline> baseline;
    if (beside_library && sources[0].format->activations == ActivationPolicy::kRowInt8) {
      auto made = Int8Baseline::Create(sources, cold);
      if (made.ok()) {
        baseline = *std::move(made);
      } else {
        Note(name(rows.front()), made.status());
      }
    }
    for (const int64_t count : rows) {
      KernelBenchRow row = {.name = name(count), .rows = count, .cold = true};
      absl::Status beside;
      row.seconds = BestSeconds(options_.seconds_per_case, [&] {
        if (baseline != nullptr && beside.ok()) beside = RunBeside(*baseline, row);
        return products.Run(count);
      });
      if (!beside.ok()) Note(row.name, beside);
      Add(std::move(row), products.bytes(count), products.operations(count), sources[0].format);
    }
  }

  // A layer's experts: its best call against the ceilings, other rows each time.
  absl::Status RunExperts(ExpertLayer& layer, const QuantizeSpec& spec, int64_t rows,
                          const std::string& name) {
    ExpertLayer::Call best;
    absl::Status failed;
    BestSeconds(options_.seconds_per_case, [&] {
      const auto call = layer.Run(rows);
      if (!call.ok()) return failed = call.status(), 0.0;
      // Calls use more or fewer experts.
      const double speed = call->bytes / call->seconds;
      if (best.seconds == 0 || speed > best.bytes / best.seconds) best = *call;
      return call->seconds;
    });
    TREADLE_RETURN_IF_ERROR(failed);
    Add({.name = name, .rows = rows, .cold = true, .seconds = best.seconds}, best.bytes,
        best.operations, spec.format);
    return absl::OkStatus();
  }

 private:
  static absl::Status RunBeside(Int8Baseline& baseline, KernelBenchRow& row) {
    TREADLE_ASSIGN_OR_RETURN(const double seconds, baseline.Run(row.rows));
    const bool first = row.library_seconds == 0;
    row.library_seconds = first ? seconds : std::min(row.library_seconds, seconds);
    return absl::OkStatus();
  }
  void Note(const std::string& name, const absl::Status& why) {
    report_.notes.push_back(Str(name, ": cuBLASLt is not beside it: ", why.message()));
  }
  std::unique_ptr<OpRun> PrepareAsModels(OpCase op_case) {
    op_case.input_type = true;
    op_case.bf16 = options_.compute == ComputeMode::kBf16;
    return Prepare(op_case, backend_, 1);
  }

  template <typename Body>
  double Seconds(Body body) {
    // Launches of an asynchronous backend overlap with what was launched before.
    const int calls = asynchronous_ ? 20 : 1;
    return BestSeconds(options_.seconds_per_case, [&] {
      const auto start = Clock::now();
      for (int i = 0; i < calls; ++i) body();
      TREADLE_CHECK(backend_.Synchronize().ok());
      return SecondsSince(start) / calls;
    });
  }

  void Add(KernelBenchRow row, double bytes, double operations, const WeightFormat* format) {
    row.gigabytes_per_second = 1e-9 * bytes / row.seconds;
    row.gigaops_per_second = 1e-9 * operations / row.seconds;
    row.bandwidth_share = row.gigabytes_per_second / report_.peaks.read_gigabytes;
    row.compute_share = row.gigaops_per_second / Ceiling(format, options_, report_.peaks);
    report_.rows.push_back(std::move(row));
  }

  const KernelBenchOptions& options_;
  Backend& backend_;
  KernelBenchReport& report_;
  const bool asynchronous_;
};

bool Wanted(const KernelBenchOptions& options, const std::string& name) {
  return name.find(options.filter) != std::string::npos;
}

void Tell(const KernelBenchOptions& options, size_t done, size_t total) {
  if (options.progress) options.progress(static_cast<double>(done) / static_cast<double>(total));
}

void RunOpCases(const KernelBenchOptions& options, Measurement& measurement) {
  std::vector<const OpCase*> cases;
  for (const OpCase& op_case : OpCases()) {
    const bool runs = HasKvType(measurement.backend(), op_case.kv.dtype) &&
                      (op_case.kv.latent_dim == 0 || HasLatents(measurement.backend()));
    if (op_case.bench && runs && Wanted(options, op_case.name)) cases.push_back(&op_case);
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    const OpCase& c = *cases[i];
    if (c.op == Op::kMatMul && c.rows <= kColdRows && options.device != BenchDevice::kReference) {
      std::vector<RandomMatrix> matrices;
      std::vector<MatrixSource> sources;
      for (const int64_t n : c.outputs) {
        matrices.push_back(MakeRandomMatrix(*c.format, n, c.cols, 1, c.scale_block));
        sources.push_back(matrices.back().source);
      }
      measurement.RunCold(sources, c.accumulate, std::span(&c.rows, 1), /*beside_library=*/false,
                          [&](int64_t) { return c.name; });
    } else {
      measurement.Run(c);
    }
    Tell(options, i + 1, cases.size());
  }
}

// The products of a layer on a backend, and what their names get to tell which.
struct LayerRun {
  Measurement* measurement = nullptr;
  std::string suffix;
  std::vector<int64_t> rows;
  bool beside_library = false;
};

absl::Status RunExperts(const KernelBenchOptions& options, const Checkpoint& checkpoint,
                        const QuantizeSpec& spec, const LayerRun& run) {
  std::unique_ptr<ExpertLayer> layer;  // in one format, which may be gigabytes
  for (const int64_t rows : run.rows) {
    const std::string name = Str("experts/", spec.name, "/rows=", rows, run.suffix);
    if (!Wanted(options, name)) continue;
    if (layer == nullptr) {
      TREADLE_ASSIGN_OR_RETURN(layer,
                               ExpertLayer::Create(checkpoint, spec, run.measurement->backend(),
                                                   std::ranges::max(run.rows)));
    }
    TREADLE_RETURN_IF_ERROR(run.measurement->RunExperts(*layer, spec, rows, name));
  }
  return absl::OkStatus();
}

absl::Status RunLayerCases(const KernelBenchOptions& options,
                           const std::vector<QuantizeSpec>& specs, std::span<const LayerRun> runs) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(options.model));
  TREADLE_ASSIGN_OR_RETURN(const std::vector<LayerProduct> products, ProductsOfLayer(*checkpoint));
  const bool experts = checkpoint->config().experts > 0;
  const std::vector<OpCase> attention = AttentionOfLayer(checkpoint->config());
  const size_t total = specs.size() * products.size() + attention.size();
  size_t done = 0;
  for (const QuantizeSpec& spec : specs) {
    for (const LayerProduct& product : products) {
      std::vector<QuantizedMatrix> matrices;
      for (const LayerRun& run : runs) {
        const auto name = [&](int64_t rows) {
          return Str(product.name, "/", spec.name, "/rows=", rows, run.suffix);
        };
        std::vector<int64_t> wanted;
        std::ranges::copy_if(run.rows, std::back_inserter(wanted),
                             [&](int64_t rows) { return Wanted(options, name(rows)); });
        if (wanted.empty()) continue;
        if (matrices.empty()) {
          TREADLE_ASSIGN_OR_RETURN(matrices, Convert(product, spec));
        }
        std::vector<MatrixSource> sources;
        for (const QuantizedMatrix& matrix : matrices) sources.push_back(matrix.source());
        run.measurement->RunCold(sources, product.accumulate, wanted, run.beside_library, name);
      }
      Tell(options, ++done, total);
    }
    for (const LayerRun& run : runs) {
      if (!experts) break;
      TREADLE_RETURN_IF_ERROR(RunExperts(options, *checkpoint, spec, run));
    }
  }
  Measurement& measurement = *runs.front().measurement;
  for (const OpCase& op_case : attention) {
    if (Wanted(options, op_case.name)) {
      measurement.Run(op_case);
      const bool decoding = std::ssize(op_case.sequences) == op_case.rows && op_case.rows > 1;
      if (decoding && op_case.op == Op::kAttention) measurement.RunRowByRow(op_case);
    }
    Tell(options, ++done, total);
  }
  return absl::OkStatus();
}

// The backend, and its description and ceilings in the report.
absl::StatusOr<std::unique_ptr<Backend>> Open(const KernelBenchOptions& options,
                                              KernelBenchReport& report) {
  std::unique_ptr<Backend> backend;
  if (options.device == BenchDevice::kCuda) {
    TREADLE_ASSIGN_OR_RETURN(backend, CreateCudaBackend({.deterministic = options.deterministic}));
    TREADLE_ASSIGN_OR_RETURN(report.peaks, MeasureCudaPeaks());
    report.description = backend->description();
    return backend;
  }
  CpuIsa isa;
  if (options.isa.has_value()) {
    isa = *options.isa;
  } else {
    TREADLE_ASSIGN_OR_RETURN(isa, ChooseIsa());
  }
  if (options.device == BenchDevice::kReference) {
    backend = CreateReferenceBackend(options.compute);
  } else {
    TREADLE_ASSIGN_OR_RETURN(
        backend,
        CreateCpuBackend(
            {.threads = options.threads, .pin = true, .compute = options.compute, .isa = isa}));
  }
  report.description = backend->description();
  ThreadPool pool(options.threads > 0 ? options.threads : UsableCpus(), /*pin=*/true);
  pool.PinCaller();
  report.peaks = MeasurePeaks(pool, isa);
  return backend;
}

}  // namespace

absl::StatusOr<KernelBenchReport> RunKernelBench(const KernelBenchOptions& options) {
  std::vector<QuantizeSpec> specs;
  for (const std::string& format : options.formats) {
    TREADLE_ASSIGN_OR_RETURN(specs.emplace_back(), ParseQuantizeSpec(format));
  }
  if (!options.crossover_rows.empty() && options.device != BenchDevice::kCuda) {
    return InvalidArgument("rows to find crossovers at, with device ",
                           WordOf(kBenchDevices, options.device),
                           ": only cuda has kernels for few rows and others for many");
  }
  KernelBenchReport report;
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, Open(options, report));
  backend->BindThread();
  Measurement measurement(options, *backend, report);
  const LayerRun run = {&measurement, "", options.rows, options.device == BenchDevice::kCuda};
  if (options.model.empty()) {
    RunOpCases(options, measurement);
  } else if (options.crossover_rows.empty()) {
    TREADLE_RETURN_IF_ERROR(RunLayerCases(options, specs, std::span(&run, 1)));
  } else {
    const auto open = [&](int64_t few_rows) {
      return CreateCudaBackend({.deterministic = options.deterministic, .few_rows = few_rows});
    };
    TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> few_backend, open(INT64_MAX));
    TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> many_backend, open(0));
    Measurement few(options, *few_backend, report);
    Measurement many(options, *many_backend, report);
    const LayerRun runs[] = {
        run, {&few, "/few", options.crossover_rows}, {&many, "/many", options.crossover_rows}};
    TREADLE_RETURN_IF_ERROR(RunLayerCases(options, specs, runs));
  }
  if (report.rows.empty()) {
    return NotFound("no benchmark case has '", options.filter, "' in its name");
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
    nlohmann::json& out = json["rows"].emplace_back();
    out = {{"name", row.name},
           {"rows", row.rows},
           {"cold", row.cold},
           {"seconds", row.seconds},
           {"gigabytes_per_second", row.gigabytes_per_second},
           {"gigaops_per_second", row.gigaops_per_second},
           {"bandwidth_share", row.bandwidth_share},
           {"compute_share", row.compute_share}};
    if (row.library_seconds == 0) continue;
    out["library_seconds"] = row.library_seconds;
    out["times_library"] = row.library_seconds / row.seconds;
  }
  if (!report.notes.empty()) json["notes"] = report.notes;
  return json.dump(1);
}

std::string ToTable(const KernelBenchReport& report) {
  std::string table = absl::StrFormat(
      "%s\nceilings: read %.1f GB/s, float %.0f GFLOP/s, 8-bit integer %.0f GOP/s\n",
      report.description, report.peaks.read_gigabytes, report.peaks.float_gigaops,
      report.peaks.integer_gigaops);
  absl::StrAppendFormat(&table, "%-52s %6s %12s %8s %5s %9s %5s\n", "case", "memory", "us", "GB/s",
                        "%", "GOP/s", "%");
  bool beside_library = false;
  for (const KernelBenchRow& row : report.rows) {
    absl::StrAppendFormat(&table, "%-52s %6s %12.2f %8.2f %5.0f %9.1f %5.0f", row.name,
                          row.cold ? "cold" : "warm", 1e6 * row.seconds, row.gigabytes_per_second,
                          100 * row.bandwidth_share, row.gigaops_per_second,
                          100 * row.compute_share);
    if (row.library_seconds > 0) {
      beside_library = true;
      absl::StrAppendFormat(&table, "  %.2f of cuBLASLt int8 + dequantize (%.2f us)",
                            row.library_seconds / row.seconds, 1e6 * row.library_seconds);
    }
    table += '\n';
  }
  if (beside_library) {
    table +=
        "cuBLASLt int8 + dequantize takes no outliers out, so it does less than LLM.int8(); its "
        "launches are replayed from a graph, and a layer's matrices of one input are one product\n";
  }
  for (const std::string& note : report.notes) table += note + '\n';
  return table;
}

}  // namespace treadle
