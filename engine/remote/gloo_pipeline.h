// The pipeline between worker processes on CPUs: one Gloo communicator per epoch.
#pragma once

#include <string>

#include "engine/remote/worker.h"

namespace treadle {

// `data_interface`: as GlooOptions. Thread safety: what it makes may be called from any thread.
PipelineFactory GlooPipeline(const std::string& data_interface);

}  // namespace treadle
