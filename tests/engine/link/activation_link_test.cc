// The link between stages: what comes out of a pipeline is what went in.

#include "engine/activation_link.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "tests/engine/link/link_pipeline.h"
#include "tests/support/assert_ok.h"
#include "tests/support/ranks/ranks.h"
#include "tests/support/ranks/thread_links.h"

namespace treadle {
namespace {

// Checks at every call that no transfer writes where another one still reads or writes, and that
// nothing writes to what is being sent.
class WatchfulCommunicator final : public Communicator {
 public:
  explicit WatchfulCommunicator(CommunicatorPtr inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  bool asynchronous() const override { return inner_->asynchronous(); }
  absl::Status AllReduce(const float*, int64_t, bool, float*) override { return Unexpected(); }
  absl::Status AllGather(const void*, size_t, void*) override { return Unexpected(); }
  absl::Status Broadcast(void*, size_t, int) override { return Unexpected(); }
  absl::StatusOr<Transfer> Send(const void* data, size_t bytes, int to) override {
    return Watch(inner_->Send(data, bytes, to), data, bytes, true);
  }
  absl::StatusOr<Transfer> Recv(void* data, size_t bytes, int from) override {
    return Watch(inner_->Recv(data, bytes, from), data, bytes, false);
  }
  absl::Status Wait(Transfer transfer) override {
    const absl::Status status = inner_->Wait(transfer);
    const auto node = pending_.extract(transfer);
    EXPECT_FALSE(node.empty());
    if (!node.empty() && node.mapped().send) {
      const Region& region = node.mapped();
      EXPECT_EQ(std::memcmp(region.begin, region.contents.data(), region.contents.size()), 0)
          << "the link wrote to a message that was being sent";
    }
    return status;
  }
  void Abort(absl::Status why) override { inner_->Abort(std::move(why)); }

 private:
  struct Region {
    const std::byte* begin;
    std::vector<std::byte> contents;
    bool send;
  };
  static absl::Status Unexpected() { return absl::InternalError("not what a link does"); }
  absl::StatusOr<Transfer> Watch(absl::StatusOr<Transfer> transfer, const void* data, size_t bytes,
                                 bool send) {
    const auto* const begin = static_cast<const std::byte*>(data);
    for (const auto& [other, region] : pending_) {
      EXPECT_TRUE(begin + bytes <= region.begin || region.begin + region.contents.size() <= begin)
          << "two transfers of one place";
    }
    if (transfer.ok()) {
      pending_.emplace(*transfer, Region{begin, {begin, begin + (send ? bytes : 0)}, send});
      if (!send) pending_.at(*transfer).contents.resize(bytes);
    }
    return transfer;
  }

  const CommunicatorPtr inner_;
  std::map<Transfer, Region> pending_;
};

TEST(ActivationLink, WhatGoesInComesOutBetweenThreads) {
  for (const WireType wire : kWires) {
    for (const int stages : {2, 3, 4}) {
      for (const int ahead : {0, 1, 5}) {
        const PipelineCase test = RandomCase(wire, ahead, 40, 10 * stages + ahead);
        ExpectAllReceived(
            RunThreads(stages, test, kLong,
                       [](int, CommunicatorPtr inner) -> CommunicatorPtr {
                         return std::make_unique<WatchfulCommunicator>(std::move(inner));
                       }),
            test);
      }
    }
  }
}

TEST(ActivationLink, WhatGoesInComesOutBetweenProcesses) {
  for (const WireType wire : kWires) {
    for (const int ahead : {0, 1, 3}) {
      const RendezvousFolder folder;
      const PipelineCase test = RandomCase(wire, ahead, 100, ahead);
      RankProcesses processes(3, [&](int stage) {
        const Outcome outcome =
            RunStage(JoinGloo(stage, 3, folder, kLong), test, [&] { AttendAll(stage, 3, folder); });
        EXPECT_TRUE(outcome.status.ok()) << outcome.status;
        return outcome.status.ok() && outcome.right;
      });
      for (int stage = 0; stage < 3; ++stage) EXPECT_EQ(processes.Wait(stage), 0) << stage;
    }
  }
}

// Two links, the second of which is told something else.
absl::Status ReceiveStatus(WireType sent_wire, uint64_t sent_epoch, uint64_t sent_iteration,
                           WireType wire, uint64_t epoch, uint64_t iteration) {
  std::vector<CommunicatorPtr> ranks = CreateThreadLinks(2, kLong);
  const std::unique_ptr<Backend> backend = CreateReferenceBackend();
  auto sender = ActivationLink::Create(*backend, std::move(ranks[0]), LinkOptions(0, 2, sent_wire));
  auto receiver = ActivationLink::Create(*backend, std::move(ranks[1]), LinkOptions(1, 2, wire));
  const auto hidden = (*sender)->Receive(sent_epoch, sent_iteration, 1);
  EXPECT_TRUE((*sender)->Send(sent_epoch, sent_iteration, *hidden).ok());
  const absl::Status status = (*receiver)->Receive(epoch, iteration, 1).status();
  // An error is final.
  if (!status.ok()) {
    EXPECT_EQ((*receiver)->Receive(epoch, iteration + 1, 1).status(), status);
  }
  return status;
}

TEST(ActivationLink, AMessageOfAnotherPlanIsNamed) {
  constexpr WireType kF32 = WireType::kF32;
  EXPECT_TRUE(ReceiveStatus(kF32, 3, 5, kF32, 3, 5).ok());
  for (const auto& [epoch, iteration] : {std::pair{4, 5}, std::pair{3, 6}}) {
    const absl::Status status = ReceiveStatus(kF32, 3, 5, kF32, epoch, iteration);
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_NE(status.message().find("found epoch 3, iteration 5, 1 rows of f32"), std::string::npos)
        << status;
  }
  EXPECT_FALSE(ReceiveStatus(kF32, 3, 5, WireType::kBf16, 3, 5).ok());
}

TEST(ActivationLink, RowsOutOfRangeAreRefused) {
  std::vector<CommunicatorPtr> ranks = CreateThreadLinks(2, kLong);
  const std::unique_ptr<Backend> backend = CreateReferenceBackend();
  auto link =
      ActivationLink::Create(*backend, std::move(ranks[1]), LinkOptions(1, 2, WireType::kF32));
  for (const int64_t rows : {int64_t{-1}, kMaxRows + 1}) {
    EXPECT_TRUE(absl::IsInvalidArgument((*link)->Announce(kEpoch, 0, rows)));
    EXPECT_TRUE(absl::IsInvalidArgument((*link)->Receive(kEpoch, 0, rows).status()));
  }
  ranks = CreateThreadLinks(2, kLong);
  EXPECT_TRUE(absl::IsInvalidArgument(
      ActivationLink::Create(*backend, std::move(ranks[1]), {.previous = 0}).status()));
}

// A first stage may begin the next iteration before it sends the one before it.
TEST(ActivationLink, OneIterationMayBeBegunBeforeAnotherIsSent) {
  std::vector<CommunicatorPtr> ranks = CreateThreadLinks(2, kLong);
  const std::unique_ptr<Backend> backend = CreateReferenceBackend();
  auto sender =
      ActivationLink::Create(*backend, std::move(ranks[0]), LinkOptions(0, 2, WireType::kF32));
  auto receiver =
      ActivationLink::Create(*backend, std::move(ranks[1]), LinkOptions(1, 2, WireType::kF32));
  constexpr uint64_t kIterations = 7;
  std::vector<Tensor> begun;
  const auto send = [&](uint64_t iteration) {
    ASSERT_TRUE((*sender)->Send(kEpoch, iteration, begun[iteration]).ok());
    ASSERT_OK_AND_ASSIGN(const auto received, (*receiver)->Receive(kEpoch, iteration, 2));
    EXPECT_EQ(received.Row<float>(1)[kHidden - 1], static_cast<float>(iteration));
  };
  for (uint64_t i = 0; i < kIterations; ++i) {
    begun.push_back((*sender)->Receive(kEpoch, i, 2).value());
    begun[i].Row<float>(1)[kHidden - 1] = static_cast<float>(i);
    if (i > 0) send(i - 1);
  }
  send(kIterations - 1);
}

// Send's message is where Receive said, with nothing but the header in front.
TEST(ActivationLink, F32IsNotCopied) {
  const size_t header = WireBytes(WireType::kF32, 0, kHidden);
  std::vector<CommunicatorPtr> ranks = CreateThreadLinks(2, kLong);
  const std::unique_ptr<Backend> backend = CreateReferenceBackend();
  auto link =
      ActivationLink::Create(*backend, std::move(ranks[0]), LinkOptions(0, 2, WireType::kF32));
  ASSERT_OK_AND_ASSIGN(const auto hidden, (*link)->Receive(kEpoch, 0, 2));
  hidden.Row<float>(0)[0] = 1;
  ASSERT_TRUE((*link)->Send(kEpoch, 0, hidden).ok());
  // The transfer reads the buffer when its receiver comes: a change in between shows there.
  hidden.Row<float>(0)[0] = 2;
  std::vector<std::byte> message(header + 2 * kHidden * sizeof(float));
  const auto transfer = ranks[1]->Recv(message.data(), message.size(), 0);
  ASSERT_TRUE(ranks[1]->Wait(*transfer).ok());
  float first = 0;
  std::memcpy(&first, message.data() + header, sizeof(first));
  EXPECT_EQ(first, 2);
}

}  // namespace
}  // namespace treadle
