// An engine of virtual time: it computes no token, and says when a pipeline of stages would have.
//
// A plan enters the first stage when it is submitted, each next stage a hop after it left the one
// before, and waits there until the plan before it has left. So a stage runs one plan at a time, in
// order, as stages do (engine/stage_ranks.h). Every sampled token is kToken.
//
// Thread safety: one thread, which also moves the clock.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "engine/engine.h"
#include "scheduler/loop_core.h"

namespace treadle {

class VirtualClock final : public TimeSource {
 public:
  Clock::time_point Now() const override { return now_; }
  // Seconds since the simulation began.
  double seconds() const { return std::chrono::duration<double>(now_ - kBegin).count(); }
  void Set(double seconds) { now_ = TimeOf(seconds); }

 private:
  // Well after the clock's epoch, which means "unset" in a request.
  static constexpr Clock::time_point kBegin{std::chrono::hours(1)};
  static Clock::time_point TimeOf(double seconds) {
    return kBegin +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  Clock::time_point now_ = kBegin;
};

struct VirtualEngineOptions {
  int stages = 1;
  int depth = 1;
  double hop = 0;  // seconds that activations take from a stage to the next one
  // Seconds that a stage takes for a plan with steps.
  std::function<double(const IterationPlan& plan, int stage)> seconds;
  // Instead: gives a plan's result, and when it is done, in the clock's seconds.
  std::function<double(const IterationPlan& plan, IterationResult& result)> answer = {};
};

class VirtualEngine final : public Engine {
 public:
  static constexpr int32_t kToken = 0;

  VirtualEngine(const VirtualClock& clock, VirtualEngineOptions options)
      : clock_(clock), options_(std::move(options)), free_at_(options_.stages, 0.0) {}

  absl::Status Start(std::function<void()>) override { return absl::OkStatus(); }
  int stages() const override { return options_.stages; }
  int depth() const override { return options_.depth; }
  uint64_t epoch() const override { return 1; }
  bool HasRoom() const override { return std::ssize(running_) < options_.depth; }
  void Submit(IterationPlan plan) override;
  void SetMasks(uint64_t, uint64_t, std::vector<OutputMask>) override {}
  std::vector<IterationResult> TakeResults() override;
  absl::Status status() const override { return absl::OkStatus(); }
  void Restart() override {}
  void SetTracing(bool) override {}
  std::vector<TraceEvent> TakeTrace() override { return {}; }

  // When the oldest plan is done, in the clock's seconds; nothing: none runs.
  std::optional<double> NextDone() const;
  int64_t iterations() const { return iterations_; }  // with steps
  double busy() const { return busy_; }               // seconds of all stages together

 private:
  struct Running {
    double done = 0;
    IterationResult result;
  };
  const VirtualClock& clock_;
  const VirtualEngineOptions options_;
  std::vector<double> free_at_;  // [stages]
  std::deque<Running> running_;
  int64_t iterations_ = 0;
  double busy_ = 0;
};

}  // namespace treadle
