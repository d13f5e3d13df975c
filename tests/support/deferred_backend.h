// A host backend that behaves as an asynchronous device does where the engine can notice: samples
// are not there before their mark is waited for, batches are padded, and a graph's ops have to use
// the addresses that its first run had.
#pragma once

#include <atomic>
#include <bit>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/forwarding_backend.h"

namespace treadle {

class DeferredBackend final : public ForwardingBackend {
 public:
  // Calls so far; to be read when the engine rests.
  struct Counts {
    std::atomic<int> most_on_their_way = 0;  // marks set and not waited for
    std::atomic<int> replays = 0;            // runs of a graph after its first
  };

  DeferredBackend(std::unique_ptr<Backend> below, std::shared_ptr<Counts> counts)
      : ForwardingBackend(std::move(below)), counts_(std::move(counts)) {}

  bool asynchronous() const override { return true; }
  int64_t PaddedRows(int64_t rows) const override {
    return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  }
  absl::Status RunGraph(const GraphKey& key, const std::function<absl::Status()>& ops) override {
    addresses_.clear();
    TREADLE_RETURN_IF_ERROR(ops());
    const auto [first, added] = graphs_.try_emplace(key, addresses_);
    if (added) return absl::OkStatus();
    TREADLE_CHECK(first->second == addresses_);
    ++counts_->replays;
    return absl::OkStatus();
  }
  void ForgetGraphs() override { graphs_.clear(); }

  void Sample(Tensor logits, std::span<const SampleRow> rows,
              std::span<SampleResult> results) override {
    addresses_.push_back(logits.data);
    std::vector<SampleResult> real(results.size());
    ForwardingBackend::Sample(logits, rows, real);
    for (SampleResult& result : results) result.token = kNotYet;
    pending_.push_back({std::move(real), results});
  }

  void SetMark(int mark) override {
    marks_[mark] = std::exchange(pending_, {});
    unwaited_[mark] = true;
    counts_->most_on_their_way =
        std::max(counts_->most_on_their_way.load(), unwaited_[0] + unwaited_[1]);
  }
  absl::Status WaitForMark(int mark) override {
    unwaited_[mark] = false;
    Deliver(marks_[mark]);
    return absl::OkStatus();
  }
  absl::Status Synchronize() override {
    for (auto& mark : marks_) Deliver(mark);
    Deliver(pending_);
    return absl::OkStatus();
  }

 private:
  static constexpr int32_t kNotYet = -77;
  struct Pending {
    std::vector<SampleResult> real;
    std::span<SampleResult> results;
  };
  static void Deliver(std::vector<Pending>& all) {
    for (const Pending& pending : all) std::ranges::copy(pending.real, pending.results.begin());
    all.clear();
  }

  const std::shared_ptr<Counts> counts_;
  std::vector<Pending> pending_;
  std::vector<Pending> marks_[2];
  bool unwaited_[2] = {};
  std::vector<const void*> addresses_;
  std::map<GraphKey, std::vector<const void*>> graphs_;
};

}  // namespace treadle
