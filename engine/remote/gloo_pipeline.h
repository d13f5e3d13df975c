// The pipeline between worker processes, through their hosts: one communicator per epoch, of Gloo
// unless a test brings its own.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/collectives/communicator.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

struct PipelineRequest {
  uint64_t epoch = 0;
  int rank = 0;  // the stage
  int size = 1;
  std::chrono::milliseconds timeout;  // of every wait, and until all stages are there
};
// Makes the communicator between the stages of one epoch; may wait for the others.
using PipelineFactory = std::function<absl::StatusOr<std::unique_ptr<Communicator>>(
    const PipelineRequest&, Rendezvous&)>;

// `data_interface`: as GlooOptions. Thread safety: what it makes may be called from any thread.
PipelineFactory GlooPipeline(const std::string& data_interface);

}  // namespace treadle
