// Accelerators by their data sheets, and the parts of these numbers that an engine reaches.
//
// Thread safety: constant tables.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"

namespace treadle {

// One accelerator. Bytes, bytes/s of one direction, and operations/s of dense products in 16 bits.
struct Hardware {
  std::string_view name;
  double memory = 0;
  double bandwidth = 0;  // of the memory
  double operations = 0;
  double link = 0;     // to the others of its host
  double network = 0;  // to other hosts
  int64_t per_host = 8;
  std::string_view source;
};
std::span<const Hardware> HardwareTable();
// NotFound lists the names.
absl::StatusOr<Hardware> FindHardware(std::string_view name);

// The share of a data sheet that an engine reaches.
struct Efficiency {
  std::string_view name;
  double memory = 1;      // part of the memory that weights and K/V may fill
  double bandwidth = 1;   // part of the memory's and links' bandwidths
  double operations = 1;  // part of the operations/s
  double layer = 0;       // seconds of each layer for launches and synchronization
  double all_reduce = 0;  // seconds of latency of each, two a layer
  double hop = 0;         // seconds of latency from a stage to the next
  double sample = 0;      // seconds of each row that something is sampled after
  double iteration = 0;   // seconds of each plan on each stage for control messages
  std::string_view source;
};
// Treadle on GPUs, by its measurements.
extern const Efficiency kTreadleEfficiency;
// ORCA's engine and FasterTransformer in 2022, fitted to what the text says of Figure 9.
extern const Efficiency kOrcaEfficiency;
extern const Efficiency kFasterTransformerEfficiency;

}  // namespace treadle
