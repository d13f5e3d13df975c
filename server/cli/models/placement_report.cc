#include "server/cli/models/placement_report.h"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "engine/placement.h"
#include "kernels/cpu/cpu_backend.h"
#include "models/tensor_parallel.h"

namespace treadle {
namespace {

std::string MiB(uint64_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

struct Placement {
  std::vector<PlacedStage> stages;
  PlacementMemory memory;
  std::string backend;

  uint64_t KvBytesPerToken() const {
    uint64_t sum = 0;
    for (const PlacedStage& stage : stages) sum += stage.kv_bytes_per_token;
    return sum;
  }
  size_t Tightest() const {
    const auto fewer = [this](const PlacedStage& a, const PlacedStage& b) {
      return a.KvTokens(memory) < b.KvTokens(memory);
    };
    return std::min_element(stages.begin(), stages.end(), fewer) - stages.begin();
  }
};

// The cheap checks first.
absl::StatusOr<Placement> Place(const Checkpoint& checkpoint, const PlacementRequest& request) {
  const int64_t layers = checkpoint.config().layers;
  if (request.pipeline_parallel < 1 || request.pipeline_parallel > layers) {
    return InvalidArgument("--pipeline-parallel is ", request.pipeline_parallel, ", expected 1 to ",
                           layers, ", the layers of ", checkpoint.path());
  }
  TREADLE_RETURN_IF_ERROR(CheckShard(checkpoint, request.weights, request.tensor_parallel));
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend,
                           CreateCpuBackend({.threads = request.threads}));
  CostOptions options;
  options.load.weights = request.weights;
  options.load.threads = request.threads;
  options.load.max_batch_tokens = request.batch_tokens;
  options.load.shard = {.rank = 0, .size = request.tensor_parallel};
  options.rows = request.batch;
  options.prompt_tokens = request.prompt_tokens;
  TREADLE_ASSIGN_OR_RETURN(const PlacementCosts costs, MeasureCosts(checkpoint, *backend, options));
  Placement placement;
  placement.backend = backend->description();
  placement.memory = {.device_bytes = static_cast<uint64_t>(request.device_memory),
                      .page_size = request.page_size};
  TREADLE_ASSIGN_OR_RETURN(placement.stages,
                           PlaceLayers(costs, request.pipeline_parallel, placement.memory));
  return placement;
}

std::string Text(const Placement& placement, const PlacementRequest& request) {
  const bool room = placement.memory.device_bytes > 0;
  std::string out =
      Str(request.pipeline_parallel, request.pipeline_parallel == 1 ? " stage" : " stages", " of ",
          request.tensor_parallel, request.tensor_parallel == 1 ? " rank" : " ranks",
          "; bytes are of each rank, times of an iteration of ", request.batch,
          " decoding sequences and ", request.prompt_tokens, " prompt tokens, measured on ",
          placement.backend, "\n\nstage      layers        time       weights   activations",
          room ? "      K/V room      tokens" : "", "\n");
  for (size_t i = 0; i < placement.stages.size(); ++i) {
    const PlacedStage& stage = placement.stages[i];
    absl::StrAppendFormat(&out, "    %d%12s%9.3f ms%14s%14s", i,
                          Str(stage.layers.begin, "-", stage.layers.end - 1), stage.seconds * 1e3,
                          MiB(stage.weight_bytes), MiB(stage.other_bytes));
    if (room) {
      absl::StrAppendFormat(&out, "%14s%12d", MiB(stage.KvBytes(placement.memory)),
                            stage.KvTokens(placement.memory));
    }
    out += '\n';
  }
  const double balance = Balance(placement.stages);
  absl::StrAppendFormat(
      &out,
      "\nbalance %.3f: the pipeline, when full, runs %.2f times the iterations of its stages one "
      "after the other\nK/V per token %.1f KiB in all stages, per rank",
      balance, balance * static_cast<double>(placement.stages.size()),
      static_cast<double>(placement.KvBytesPerToken()) / 1024);
  if (room) {
    const size_t tightest = placement.Tightest();
    absl::StrAppendFormat(&out, "; stage %d is the tightest: %d tokens", tightest,
                          placement.stages[tightest].KvTokens(placement.memory));
  }
  return out + '\n';
}

std::string Json(const Placement& placement, const PlacementRequest& request) {
  nlohmann::ordered_json json = {{"pipeline_parallel", request.pipeline_parallel},
                                 {"tensor_parallel", request.tensor_parallel},
                                 {"batch", request.batch},
                                 {"prompt_tokens", request.prompt_tokens},
                                 {"batch_tokens", request.batch_tokens},
                                 {"backend", placement.backend},
                                 {"balance", Balance(placement.stages)},
                                 {"kv_bytes_per_token", placement.KvBytesPerToken()}};
  if (placement.memory.device_bytes > 0) {
    json["device_bytes"] = placement.memory.device_bytes;
    json["kv_tokens"] = placement.stages[placement.Tightest()].KvTokens(placement.memory);
  }
  json["stages"] = nlohmann::ordered_json::array();
  for (const PlacedStage& stage : placement.stages) {
    nlohmann::ordered_json entry = {{"first_layer", stage.layers.begin},
                                    {"end_layer", stage.layers.end},
                                    {"seconds", stage.seconds},
                                    {"weight_bytes", stage.weight_bytes},
                                    {"activation_bytes", stage.other_bytes},
                                    {"kv_bytes_per_token", stage.kv_bytes_per_token}};
    if (placement.memory.device_bytes > 0) {
      entry["kv_bytes"] = stage.KvBytes(placement.memory);
      entry["kv_tokens"] = stage.KvTokens(placement.memory);
    }
    json["stages"].push_back(std::move(entry));
  }
  return json.dump(2) + '\n';
}

}  // namespace

absl::StatusOr<std::string> PlacementReport(const Checkpoint& checkpoint,
                                            const PlacementRequest& request, bool json) {
  TREADLE_ASSIGN_OR_RETURN(const Placement placement, Place(checkpoint, request));
  return json ? Json(placement, request) : Text(placement, request);
}

}  // namespace treadle
