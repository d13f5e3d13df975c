// A communicator that hands everything on to another one: what tests override some methods of.
#pragma once

#include <memory>
#include <utility>

#include "kernels/collectives/communicator.h"

namespace treadle {

class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(std::unique_ptr<Communicator> below) : below_(std::move(below)) {}

  int rank() const override { return below_->rank(); }
  int size() const override { return below_->size(); }
  bool asynchronous() const override { return below_->asynchronous(); }
  absl::Status AllReduce(const float* in, int64_t count, bool accumulate, float* out) override {
    return below_->AllReduce(in, count, accumulate, out);
  }
  absl::Status AllGather(const void* in, size_t bytes, void* out) override {
    return below_->AllGather(in, bytes, out);
  }
  absl::Status Broadcast(void* data, size_t bytes, int root) override {
    return below_->Broadcast(data, bytes, root);
  }
  absl::StatusOr<Transfer> Send(const void* data, size_t bytes, int to) override {
    return below_->Send(data, bytes, to);
  }
  absl::StatusOr<Transfer> Recv(void* data, size_t bytes, int from) override {
    return below_->Recv(data, bytes, from);
  }
  absl::Status Wait(Transfer transfer) override { return below_->Wait(transfer); }
  void Abort(absl::Status why) override { below_->Abort(std::move(why)); }

 protected:
  Communicator& below() { return *below_; }
  // For a destructor whose members the one below still uses.
  void EndBelow() { below_.reset(); }

 private:
  std::unique_ptr<Communicator> below_;
};

}  // namespace treadle
