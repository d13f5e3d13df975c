#include "engine/stage_pipeline.h"

#include <utility>

#include "base/status.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {
namespace {

constexpr int kSender = 0;
constexpr int kReceiver = 1;

// The way from `stage` to the next one.
absl::StatusOr<std::unique_ptr<Communicator>> JoinLink(const StagePipeline& pipeline, int stage,
                                                       int rank, int end, Backend& backend) {
  RendezvousSection section(*pipeline.rendezvous, Str("stage ", stage, " rank ", rank));
  return pipeline.link({.backend = backend,
                        .rank = end,
                        .size = 2,
                        .rendezvous = section,
                        .timeout = pipeline.timeout});
}

}  // namespace

absl::StatusOr<std::unique_ptr<ActivationLink>> JoinNeighbours(
    const StagePipeline& pipeline, std::unique_ptr<Communicator> communicator, int rank,
    Backend& backend, int64_t hidden, int64_t max_batch_tokens) {
  const bool first = pipeline.stage == 0;
  const bool last = pipeline.stage + 1 == pipeline.stages;
  ActivationLink::Options options{
      .hidden = hidden, .max_batch_tokens = max_batch_tokens, .wire = pipeline.wire};
  if (!pipeline.link) {
    if (communicator == nullptr) return nullptr;  // one stage, or not rank 0
    if (!first) options.previous = pipeline.stage - 1;
    if (!last) options.next = pipeline.stage + 1;
    return ActivationLink::Create(backend, std::move(communicator), options);
  }
  std::unique_ptr<Communicator> previous;
  std::unique_ptr<Communicator> next;
  if (!first) {
    TREADLE_ASSIGN_OR_RETURN(previous,
                             JoinLink(pipeline, pipeline.stage - 1, rank, kReceiver, backend));
    options.previous = kSender;
  }
  if (!last) {
    auto joined = JoinLink(pipeline, pipeline.stage, rank, kSender, backend);
    if (!joined.ok()) {
      if (previous) previous->Abort(joined.status());  // an end in order would wait for its peer
      return joined.status();
    }
    next = *std::move(joined);
    options.next = kReceiver;
  }
  return ActivationLink::CreateOnDevice(backend, std::move(previous), std::move(next), options);
}

}  // namespace treadle
