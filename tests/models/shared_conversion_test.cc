#include "models/checkpoints/shared_conversion.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace treadle {
namespace {

constexpr int kRanks = 3;
constexpr int kMatrices = 200;

void OnRanks(const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
}

TEST(SharedConversion, EachMatrixIsMadeOnceAndOnlyOneAtATime) {
  SharedConversion conversion(kRanks);
  std::atomic<int> made = 0, used = 0;
  OnRanks([&](int rank) {
    for (int i = 0; i < kMatrices; ++i) {
      const auto make = [&, i]() -> absl::StatusOr<QuantizedMatrix> {
        EXPECT_EQ(made.fetch_add(1), i);
        EXPECT_EQ(used.load(), i * kRanks) << "the one before is still in use";
        QuantizedMatrix matrix;
        matrix.n = i;
        return matrix;
      };
      EXPECT_TRUE(conversion
                      .Use(rank, make,
                           [&](const QuantizedMatrix& matrix) {
                             EXPECT_EQ(matrix.n, i);
                             used.fetch_add(1);
                             return absl::OkStatus();
                           })
                      .ok());
    }
  });
  EXPECT_EQ(made.load(), kMatrices);
}

TEST(SharedConversion, WhatCannotBeMadeIsEveryRanksError) {
  SharedConversion conversion(kRanks);
  OnRanks([&](int rank) {
    const absl::Status status = conversion.Use(
        rank, [] { return absl::InvalidArgumentError("not finite"); },
        [](const QuantizedMatrix&) { return absl::OkStatus(); });
    EXPECT_EQ(status, absl::InvalidArgumentError("not finite"));
  });
}

TEST(SharedConversion, NobodyWaitsForARankThatFailed) {
  SharedConversion conversion(kRanks);
  OnRanks([&](int rank) {
    absl::Status status;
    for (int i = 0; i < kMatrices && status.ok(); ++i) {
      if (rank == 1 && i == kMatrices / 2) {
        conversion.Leave();
        return;
      }
      status = conversion.Use(
          rank, [] { return QuantizedMatrix(); },
          [](const QuantizedMatrix&) { return absl::OkStatus(); });
    }
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
  });
}

}  // namespace
}  // namespace treadle
