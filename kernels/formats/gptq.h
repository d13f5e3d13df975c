// GPTQ's and AWQ's tensors as one matrix of an apart format ("gptq4", "gptq8").
//
// Sources: AutoGPTQ's and AutoAWQ's checkpoints. With g = k / group_size: W[n, k] = scales[g, n] *
// (q[n, k] - z[g, n]).
//
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/formats/quantize.h"

namespace treadle {

enum class GroupPacking : uint8_t {
  kGptqV1,  // a stored zero point z is z - 1
  kGptqV2,
  kAwq,  // 4 bits
};

struct GroupQuantizedTensors {
  GroupPacking packing = GroupPacking::kGptqV1;
  int bits = 4;  // 4 or 8
  int64_t n = 0;
  int64_t k = 0;
  int64_t group_size = 0;  // -1: all of k
  // By its configuration zero points are 2^(bits - 1). Files that are mislabelled as version 1 or 2
  // can then be told by their data, and are.
  bool symmetric = false;
  std::span<const int32_t> qweight;  // GPTQ [k * bits / 32, n], along k; AWQ [k, n / 8], along n
  std::span<const int32_t> qzeros;   // [groups, n * bits / 32]
  std::span<const uint16_t> scales;  // [groups, n], fp16
  std::span<const int32_t> g_idx;    // the group of each k; empty: k / group_size
};

// The matrix keeps every bit: its values are those of the formula in float. If all zero points are
// equal they become part of the codebook. Errors: sizes that disagree, a group that does not exist,
// and (Unimplemented) columns whose groups are in another order (act-order).
absl::StatusOr<QuantizedMatrix> ConvertGroupQuantized(const GroupQuantizedTensors& tensors,
                                                      const ParallelFor& parallel_for);

}  // namespace treadle
