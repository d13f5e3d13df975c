// Results on their way from a device that puts everything off as long as it may.
#include "kernels/cuda/runtime/result_delivery.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/emulation/emulated_device.h"

namespace treadle::cuda {
namespace {

using testing::ElementsAre;

class ResultDeliveryTest : public testing::Test {
 protected:
  ResultDeliveryTest() {
    ScopedEmulation emulation({.deferred = true});
    device_ = Device::Open(0).value();
    results_ = std::make_unique<ResultDelivery>(*device_);
    sources_ = device_->AllocateHost(sizeof(int32_t) * 100).value();
  }

  // An op whose result is `value`.
  void Op(int32_t value, int32_t* host, int64_t announced_row = -1) {
    auto place = results_->Take(sizeof(int32_t), host, announced_row);
    ASSERT_EQ(place.status(), absl::OkStatus());
    auto* const source = reinterpret_cast<int32_t*>(sources_.data()) + num_sources_++;
    *source = value;
    device_->CopyToDeviceAsync(*place, source, sizeof(int32_t));
  }
  void SetMark(int mark) {
    EXPECT_EQ(results_->SetMark(mark), absl::OkStatus());
    device_->SetMark(mark);
  }
  void WaitForMark(int mark) {
    EXPECT_EQ(device_->WaitForMark(mark), absl::OkStatus());
    results_->DeliverMarked(mark);
  }
  void Synchronize() {
    EXPECT_EQ(results_->Flush(), absl::OkStatus());
    EXPECT_EQ(device_->Synchronize(), absl::OkStatus());
    results_->DeliverAll();
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<ResultDelivery> results_;
  Buffer sources_;
  int num_sources_ = 0;
  std::vector<int32_t> host_ = std::vector<int32_t>(8, -1);
};

TEST_F(ResultDeliveryTest, CompleteAfterSynchronize) {
  EXPECT_EQ(results_->Reserve(256), absl::OkStatus());
  Op(1, &host_[0]);
  Op(2, &host_[3]);
  EXPECT_THAT(host_, ElementsAre(-1, -1, -1, -1, -1, -1, -1, -1));
  Synchronize();
  EXPECT_THAT(host_, ElementsAre(1, -1, -1, 2, -1, -1, -1, -1));
}

// While the host waits for one iteration, the next is on its way, in the same places on the device.
TEST_F(ResultDeliveryTest, AMarkBringsWhatCameBeforeIt) {
  EXPECT_EQ(results_->Reserve(256), absl::OkStatus());
  for (int32_t i = 0; i < 6; ++i) {
    Op(10 + i, &host_[i]);
    SetMark(i % 2);
    if (i == 0) continue;
    WaitForMark((i - 1) % 2);
    EXPECT_EQ(host_[i - 1], 9 + i);
    EXPECT_EQ(host_[i], -1);
  }
  WaitForMark(1);
  EXPECT_THAT(host_, ElementsAre(10, 11, 12, 13, 14, 15, -1, -1));
}

TEST_F(ResultDeliveryTest, NobodyNeedsToWait) {
  EXPECT_EQ(results_->Reserve(64), absl::OkStatus());
  const int64_t generation = results_->generation();
  for (int32_t i = 0; i < 8; ++i) {
    Op(i, &host_[i]);
    SetMark(0);
  }
  WaitForMark(0);
  EXPECT_THAT(host_, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_EQ(results_->generation(), generation);
}

// More results than there are places for: flushed in between, or a larger buffer.
TEST_F(ResultDeliveryTest, NoRoomIsNoTrouble) {
  for (int32_t i = 0; i < 8; ++i) Op(i, &host_[i]);
  Synchronize();
  EXPECT_THAT(host_, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TEST_F(ResultDeliveryTest, AReplayDeliversAgain) {
  EXPECT_EQ(results_->Reserve(sizeof(SampleResult) * 4), absl::OkStatus());
  std::vector<SampleResult> first(2), second(2);
  SampleResult* const place = reinterpret_cast<SampleResult*>(
      *results_->Take(sizeof(SampleResult) * 2, first.data(), /*announced_row=*/0));
  const ResultDelivery::Pending pending = results_->TakePending();
  std::vector<SampleResult> values(2);
  for (int32_t i = 0; i < 3; ++i) {
    values[0].token = 100 + i;
    values[1].token = 200 + i;
    device_->CopyToDevice(place, values.data(), sizeof(SampleResult) * 2);
    results_->AddPending(pending, i == 1 ? std::span(second) : std::span<SampleResult>());
    Synchronize();
  }
  EXPECT_EQ(first[0].token, 102);
  EXPECT_EQ(first[1].token, 202);
  EXPECT_EQ(second[0].token, 101);
  EXPECT_EQ(second[1].token, 201);
}

}  // namespace
}  // namespace treadle::cuda
