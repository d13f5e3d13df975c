// GPTQ's, AWQ's and compressed-tensors' tensors as one matrix of an apart format ("gptq4",
// "gptq8").
//
// Sources: AutoGPTQ's and AutoAWQ's checkpoints, and compressed-tensors' pack_to_int32. With g =
// g_idx[k], or k / group_size: W[n, k] = scales[g, n] * (q[n, k] - z[g, n]).
//
// Act-order (`desc_act`): GPTQ quantizes columns in the order of their importance, and a group is
// what came one after the other in that order. The matrix keeps a group's columns side by side, and
// says so (MatrixConstants::input_order).
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
  kRows  // compressed-tensors'
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
  // GPTQ [k * bits / 32, n], along k; AWQ [k, n / 8], along n; rows [n, k * bits / 32], along k
  std::span<const int32_t> qweight;
  // [groups, n * bits / 32]; rows: [n * bits / 32, groups], along n, n rounded up to whole words;
  // or none, with zero points of 2^(bits - 1)
  std::span<const int32_t> qzeros;
  std::span<const float> scales;  // [groups, n]; rows: [n, groups]; files have 16 bits
  // The group of each k. Empty, or all zeros (as some writers fill it): k / group_size.
  std::span<const int32_t> g_idx;
};

// The matrix keeps every bit: its values are those of the formula in float. If all zero points are
// equal they become part of the codebook. Errors: sizes that disagree, a group that does not exist.
absl::StatusOr<QuantizedMatrix> ConvertGroupQuantized(const GroupQuantizedTensors& tensors,
                                                      const ParallelFor& parallel_for);

}  // namespace treadle
