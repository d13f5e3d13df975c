#include "bench/simulate/hardware.h"

#include <string>

#include "base/status.h"

namespace treadle {
namespace {

constexpr Hardware kHardware[] = {
    {"a100-40g", 40e9, 1.555e12, 312e12, 300e9, 25e9, 8,
     "NVIDIA A100 data sheet (SXM4, 2020); 8 x 200 Gb/s a host: Azure ND96asr, ORCA section 6"},
    {"a100-80g", 80e9, 2.039e12, 312e12, 300e9, 25e9, 8,
     "NVIDIA A100 80GB data sheet (SXM4, 2021); 8 x 200 Gb/s a host: DGX A100"},
    {"h100", 80e9, 3.35e12, 989.4e12, 450e9, 50e9, 8,
     "NVIDIA H100 data sheet (SXM5, without sparsity); 8 x 400 Gb/s a host: DGX H100"},
    {"h200", 141e9, 4.8e12, 989.4e12, 450e9, 50e9, 8,
     "NVIDIA H200 data sheet (SXM5, without sparsity); 8 x 400 Gb/s a host: DGX H200"},
};

}  // namespace

std::span<const Hardware> HardwareTable() { return kHardware; }

absl::StatusOr<Hardware> FindHardware(std::string_view name) {
  std::string names;
  for (const Hardware& row : kHardware) {
    if (row.name == name) return row;
    names += Str(names.empty() ? "" : ", ", row.name);
  }
  return NotFound("hardware '", name, "' is unknown, expected one of: ", names);
}

const Efficiency kTreadleEfficiency = {
    .name = "treadle",
    .memory = 0.9,
    .bandwidth = 0.9,
    .operations = 0.61,
    .layer = 30e-6,
    .all_reduce = 20e-6,
    .hop = 50e-6,
    .source =
        "bench/results/2026-11-26-h100.md: llama-3.1-8b in bf16, decoding at batch 1 and "
        "prompts; all-reduces and hops are not measured: taken to be NCCL's usual"};

// To be fitted.
const Efficiency kOrcaEfficiency = {.name = "orca",
                                    .memory = 0.9,
                                    .bandwidth = 0.9,
                                    .operations = 0.3,
                                    .layer = 240e-6,
                                    .all_reduce = 30e-6,
                                    .hop = 50e-6};
const Efficiency kFasterTransformerEfficiency = {.name = "faster-transformer",
                                                 .memory = 0.9,
                                                 .bandwidth = 0.9,
                                                 .operations = 0.3,
                                                 .layer = 240e-6,
                                                 .all_reduce = 30e-6,
                                                 .hop = 50e-6,
                                                 .iteration = 15e-3};

}  // namespace treadle
