// Choices of an engine, and the words for them in flags.
#pragma once

#include "base/choice.h"
#include "engine/wire_codec.h"
#include "kernels/backend.h"
#include "kernels/dtype.h"

namespace treadle {

inline constexpr Choice<DType> kKvTypes[] = {
    {"f16", DType::kF16}, {"bf16", DType::kBF16}, {"f32", DType::kF32}, {"int8", DType::kI8}};
// Types that products take in on a GPU.
inline constexpr Choice<DType> kProductTypes[] = {
    {"bf16", DType::kBF16}, {"fp16", DType::kF16}, {"fp32", DType::kF32}};
inline constexpr Choice<OutlierRule> kOutlierRules[] = {{"per-row", OutlierRule::kPerRow},
                                                        {"per-call", OutlierRule::kPerCall}};
// Carriers of activations between stages. kGloo: through the hosts (ActivationLink on
// StagingPlace::kHost), on any device. kNccl: from GPU to GPU (StagingPlace::kDevice), as f32.
enum class DataPlane : uint8_t { kGloo, kNccl };
inline constexpr Choice<DataPlane> kDataPlanes[] = {{"gloo", DataPlane::kGloo},
                                                    {"nccl", DataPlane::kNccl}};
constexpr std::string_view Name(DataPlane plane) { return WordOf(kDataPlanes, plane); }

}  // namespace treadle
