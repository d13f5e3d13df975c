// The kernels of op_kernels.h as one instruction set's sources define them.
#pragma once

#include "kernels/cpu/ops/op_kernels.h"

namespace treadle::TREADLE_ISA {

void RmsNorm(const NormArguments& a);
void LayerNorm(const NormArguments& a);
void RotateStore(const RotateStoreArguments& a);
void Attention(const AttentionArguments& a);
void CombineAttention(const AttentionArguments& a);
int64_t AttentionScratchFloats(int64_t queries, int64_t head_dim);
int64_t AttentionPartialFloats(int64_t queries, int64_t head_dim);
void SwiGlu(const float* gate, const float* up, float* out, int64_t n);
void Gelu(const float* x, float* out, int64_t n);
void ExpInto(const float* x, float* out, int64_t n);
float MaxLogit(const float* x, int64_t n);
int64_t FirstAtLeast(const float* x, int64_t from, int64_t n, float floor);
float SumExp(const float* x, int64_t n, float max, float factor);
int64_t GatherBand(const float* x, int64_t n, float floor, float ceiling, float max, float factor,
                   int32_t* ids, float* weights);

}  // namespace treadle::TREADLE_ISA
