#include "kernels/cpu/matmul/row_activations.h"

#include <algorithm>
#include <bit>

#include "base/status.h"

namespace treadle {
namespace {

// A non-negative float's order is that of its bits.
int32_t ThresholdBits(float threshold) {
  return threshold > 0 ? std::bit_cast<int32_t>(threshold) : INT32_MAX;
}

}  // namespace

int64_t RowActivations::Add(const PackedView& weight) {
  const int32_t threshold_bits = ThresholdBits(weight.outlier_threshold);
  const bool of_call = weight.outliers_of_call && threshold_bits != INT32_MAX;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i].threshold_bits == threshold_bits && of_call_[i] == of_call) {
      return static_cast<int64_t>(i);
    }
  }
  of_call_.push_back(of_call);
  inputs_.push_back({.codes = nullptr,
                     .rows = nullptr,
                     .columns = nullptr,
                     .call_flags = nullptr,
                     .threshold_bits = threshold_bits});
  return static_cast<int64_t>(inputs_.size()) - 1;
}

void RowActivations::Reserve(const Tensor& x) {
  const auto rows = static_cast<size_t>(x.rows);
  const auto k = static_cast<size_t>(x.cols);
  const size_t padded = (k + kBlockValues - 1) / kBlockValues * kBlockValues;
  k_ = x.cols;
  code_row_bytes_ =
      static_cast<int64_t>(padded) * (isa_ == CpuIsa::kAvx2 ? kRowBytesAvx2 : kRowBytesVnni);
  const size_t code_bytes = rows * static_cast<size_t>(code_row_bytes_);
  const size_t row_bytes = rows * sizeof(ActivationRow);
  const size_t column_bytes = rows * k * sizeof(int32_t);
  memory_.Reserve(inputs_.size() *
                  (ScratchMemory::Aligned(code_bytes) + ScratchMemory::Aligned(row_bytes) +
                   ScratchMemory::Aligned(column_bytes) + ScratchMemory::Aligned(padded)));
  for (size_t i = 0; i < inputs_.size(); ++i) {
    RowInt8Input& input = inputs_[i];
    input.codes = memory_.Take<int8_t>(code_bytes);
    input.rows = memory_.Take<ActivationRow>(row_bytes);
    input.columns = memory_.Take<int32_t>(column_bytes);
    uint8_t* const flags = memory_.Take<uint8_t>(padded);
    input.call_flags = of_call_[i] ? flags : nullptr;
    if (of_call_[i]) std::fill(flags + k, flags + padded, 0);  // no columns: FlagColumns omits them
  }
}

RowInt8Input RowActivations::input(int64_t index, int64_t first_row) const {
  RowInt8Input input = inputs_[static_cast<size_t>(index)];
  input.codes += first_row * code_row_bytes_;
  input.rows += first_row;
  input.columns += first_row * k_;
  return input;
}

void RowActivations::FlagColumns(const Tensor& x, int64_t begin, int64_t end) const {
  for (const RowInt8Input& input : inputs_) {
    if (input.call_flags == nullptr) continue;
    kFlagOutliers[isa_](static_cast<const float*>(x.data), x.stride, x.rows, begin, end,
                        input.threshold_bits, input.call_flags);
  }
}

void RowActivations::QuantizeRows(const Tensor& x, int64_t begin, int64_t end) const {
  for (const RowInt8Input& input : inputs_) {
    for (int64_t row = begin; row < end; ++row) {
      kQuantizeRow[isa_](x.Row<float>(row), x.cols, row, input);
    }
  }
}

}  // namespace treadle
