// The reference's larger ops, one file each. Contracts: kernels/backend.h.
#pragma once

#include <memory>
#include <span>

#include "kernels/backend.h"

namespace treadle::reference {

// matmul.cc
absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source);
std::span<const float> WeightRow(const PackedMatrix& matrix, int64_t row);  // [k]
void MatMul(Tensor x, std::span<const Projection> projections, ComputeMode compute);

// attention.cc
void RotateAndStoreKv(Tensor q, Tensor k, Tensor v, const RotaryTable* rotary, const KvView& kv);
void Attention(Tensor q, const KvView& kv, float scale, Tensor out);

}  // namespace treadle::reference
