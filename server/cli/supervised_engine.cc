#include "server/cli/supervised_engine.h"

#include <utility>

namespace treadle {
namespace {

class SupervisedEngine final : public Engine {
 public:
  SupervisedEngine(std::unique_ptr<WorkerSupervisor> workers, std::unique_ptr<Engine> engine)
      : workers_(std::move(workers)), engine_(std::move(engine)) {}

  absl::Status Start(std::function<void()> wake) override {
    return engine_->Start(std::move(wake));
  }
  int stages() const override { return engine_->stages(); }
  int depth() const override { return engine_->depth(); }
  uint64_t epoch() const override { return engine_->epoch(); }

  bool HasRoom() const override {
    const bool room = engine_->HasRoom();
    stood_ = stood_ || room;
    return room;
  }

  void Submit(IterationPlan plan) override { engine_->Submit(std::move(plan)); }
  std::vector<IterationResult> TakeResults() override { return engine_->TakeResults(); }
  absl::Status status() const override { return engine_->status(); }

  void Restart() override {
    if (!std::exchange(stood_, false)) workers_->KillAll();
    engine_->Restart();
  }

  void SetTracing(bool on) override { engine_->SetTracing(on); }
  std::vector<TraceEvent> TakeTrace() override { return engine_->TakeTrace(); }

 private:
  // Did this epoch come to stand? Asking for room is what finds out.
  mutable bool stood_ = false;
  const std::unique_ptr<WorkerSupervisor> workers_;
  const std::unique_ptr<Engine> engine_;  // last: detaches from the workers before they end
};

}  // namespace

std::unique_ptr<Engine> MakeSupervisedEngine(std::unique_ptr<WorkerSupervisor> workers,
                                             std::unique_ptr<Engine> engine) {
  return std::make_unique<SupervisedEngine>(std::move(workers), std::move(engine));
}

}  // namespace treadle
