// Links whose messages lie on devices: what arrives, and what is refused by its header. The devices
// are emulated, and what is between them goes through memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "engine/activation_link.h"
#include "kernels/op_cases/random.h"
#include "tests/emulation/emulated_device.h"
#include "tests/support/emulated_gpus.h"
#include "tests/support/faults/faulty_communicator.h"
#include "tests/support/ranks/thread_links.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 100;
constexpr int64_t kMaxRows = 9;
constexpr uint64_t kEpoch = 7;
constexpr milliseconds kLong{600'000};

ActivationLink::Options LinkOptions(int previous, int next) {
  return {.previous = previous, .next = next, .hidden = kHidden, .max_batch_tokens = kMaxRows};
}

// Two stages, each on a device, on this thread: what is sent lies there until it is received.
struct Pair {
  explicit Pair(milliseconds timeout = kLong, const FaultScript& faults = {}) {
    auto ends = CreateThreadLinks(2, timeout);
    std::unique_ptr<Communicator> sends =
        std::make_unique<DeviceLink>(std::move(ends[0]), cuda::DeviceOf(*from));
    if (faults) sends = std::make_unique<FaultyCommunicator>(std::move(sends), faults);
    sender = *ActivationLink::CreateOnDevice(*from, nullptr, std::move(sends), LinkOptions(-1, 1));
    receiver =
        *ActivationLink::CreateOnDevice(*to, std::move(ends[1]), nullptr, LinkOptions(0, -1));
  }

  absl::Status Send(uint64_t epoch, uint64_t iteration, const std::vector<float>& rows) {
    const auto count = static_cast<int64_t>(rows.size()) / kHidden;
    TREADLE_ASSIGN_OR_RETURN(const Tensor hidden, sender->Receive(epoch, iteration, count));
    // In the order of ops: with late work, not before somebody waits.
    std::memcpy(computed.data(), rows.data(), rows.size() * sizeof(float));
    from->staging(StagingPlace::kHost)->Upload(hidden.data, computed.data(), rows.size() * 4);
    return sender->Send(epoch, iteration, hidden);
  }
  absl::StatusOr<std::vector<float>> Receive(uint64_t epoch, uint64_t iteration, int64_t count) {
    TREADLE_ASSIGN_OR_RETURN(const Tensor hidden, receiver->Receive(epoch, iteration, count));
    std::vector<float> rows(static_cast<size_t>(count * kHidden));
    to->CopyToHost(rows.data(), hidden.data, rows.size() * sizeof(float));
    return rows;
  }

  std::unique_ptr<Backend> from = EmulatedGpu(0, DType::kF32).value();
  std::unique_ptr<Backend> to = EmulatedGpu(1, DType::kF32).value();
  Buffer computed = from->staging(StagingPlace::kHost)->Allocate(kMaxRows * kHidden * 4).value();
  std::unique_ptr<ActivationLink> sender;
  std::unique_ptr<ActivationLink> receiver;
};

std::vector<float> Rows(uint64_t iteration, int64_t count) {
  Random random(SeedOf("rows", iteration));
  std::vector<float> rows(static_cast<size_t>(count * kHidden));
  for (float& x : rows) x = random.Normal();
  return rows;
}

TEST(DeviceLink, RowsArriveAsTheyAre) {
  for (const bool deferred : {false, true}) {
    const cuda::ScopedEmulation emulation({.deferred = deferred});
    Pair pair;
    EXPECT_EQ(pair.sender->place(), StagingPlace::kDevice);
    Random random(3);
    for (uint64_t i = 0; i < 20; ++i) {
      const int64_t count = 1 + random.Below(kMaxRows);
      const std::vector<float> sent = Rows(i, count);
      ASSERT_EQ(pair.Send(kEpoch, i, sent), absl::OkStatus());
      const auto received = pair.Receive(kEpoch, i, count);
      ASSERT_TRUE(received.ok()) << received.status();
      EXPECT_EQ(std::memcmp(received->data(), sent.data(), sent.size() * sizeof(float)), 0) << i;
    }
  }
}

// A message's room is used again only once it has been taken.
TEST(DeviceLink, NothingIsOverwrittenBeforeItIsSent) {
  Pair pair(milliseconds(100));
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(pair.Send(kEpoch, i, Rows(i, 2)), absl::OkStatus());
  EXPECT_EQ(pair.Send(kEpoch, 3, Rows(3, 2)).code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(DeviceLink, AMessageOfAnotherPlanIsRefused) {
  const struct {
    uint64_t epoch, iteration;
  } others[] = {{kEpoch - 1, 4}, {kEpoch + 1, 4}, {kEpoch, 3}, {kEpoch, 5}};
  for (const auto& [epoch, iteration] : others) {
    Pair pair;
    ASSERT_EQ(pair.Send(epoch, iteration, Rows(1, 3)), absl::OkStatus());
    const absl::Status status = pair.Receive(kEpoch, 4, 3).status();
    ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(status.message(), HasSubstr("expected epoch 7, iteration 4, 3 rows of f32; found"));
    EXPECT_EQ(pair.Receive(kEpoch, 5, 3).status(), status);  // for good
  }
}

TEST(DeviceLink, EveryBitOfAHeaderCounts) {
  const size_t bits = 8 * WireBytes(WireType::kF32, 0, kHidden);
  for (size_t bit = 0; bit < bits; ++bit) {
    Pair pair(kLong, FaultAt(0, {.kind = FaultKind::kCorrupt, .bit = bit}));
    ASSERT_EQ(pair.Send(kEpoch, 0, Rows(1, 1)), absl::OkStatus());
    EXPECT_EQ(pair.Receive(kEpoch, 0, 1).status().code(), absl::StatusCode::kDataLoss) << bit;
  }
}

TEST(DeviceLink, OnlyF32) {
  Pair pair;
  ActivationLink::Options options = LinkOptions(0, -1);
  options.wire = WireType::kInt8;
  auto ends = CreateThreadLinks(2, kLong);
  const auto link = ActivationLink::CreateOnDevice(*pair.to, std::move(ends[1]), nullptr, options);
  EXPECT_EQ(link.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(link.status().message(), HasSubstr("not as int8"));
}

}  // namespace
}  // namespace treadle
