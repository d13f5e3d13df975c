// Small checkpoints and backends for the tests of the benchmarks of quality.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/quality/teacher_forcing.h"
#include "kernels/cpu/cpu_backend.h"

namespace treadle {

inline std::unique_ptr<Checkpoint> SmallCheckpoint(const std::string& name) {
  auto checkpoint = Checkpoint::Open(std::string(TREADLE_TESTDATA) + "/models/" + name);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return std::move(checkpoint).value();
}

inline std::unique_ptr<Backend> ExactBackend() {
  auto backend = CreateCpuBackend({.threads = 2, .compute = ComputeMode::kExact});
  EXPECT_TRUE(backend.ok()) << backend.status();
  return std::move(backend).value();
}

inline std::unique_ptr<TeacherForcedModel> ExactModel(const Checkpoint& checkpoint, int64_t window,
                                                      const std::string& weights = "") {
  auto plan = WeightPlan::Parse(weights);
  EXPECT_TRUE(plan.ok()) << plan.status();
  TeacherForcedModel::Options options = {.window = window, .kv_dtype = DType::kF32};
  options.load.weights = *plan;
  options.load.threads = 2;
  auto model = TeacherForcedModel::Create(checkpoint, ExactBackend(), options);
  EXPECT_TRUE(model.ok()) << model.status();
  return std::move(model).value();
}

inline std::vector<int32_t> RandomTokens(int64_t count, int64_t vocab) {
  std::mt19937 random(7);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>(random() % vocab));
  return tokens;
}

}  // namespace treadle
