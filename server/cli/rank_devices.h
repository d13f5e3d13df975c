// What the ranks of this process run on: the CPU, or a GPU each (--device).
//
// Thread safety: call from one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/stage_ranks.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "server/configuration.h"

namespace treadle {

class RankDevices {
 public:
  // `auto` takes GPUs where there are any. Errors: no GPU, or fewer than ranks, and why; options
  // that the device does not have.
  static absl::StatusOr<RankDevices> Choose(const ServeOptions& options);

  bool cuda() const { return !gpus_.empty(); }
  // "GPU", "this machine".
  std::string_view owner() const { return cuda() ? "GPU" : "this machine"; }
  // One backend per rank, in order: CPUs are shared out over them, GPUs are one each.
  absl::StatusOr<std::vector<std::unique_ptr<Backend>>> Create() const;
  // How those ranks are joined (StageRanks::Options).
  RankJoiner Joiner() const;
  // Bytes that all ranks together can have now. On GPUs: as many times the fullest one's.
  int64_t AvailableBytes() const;
  // How much of that a K/V cache may take if nobody says: a machine has other uses, a GPU has not.
  double CacheShare() const { return cuda() ? 0.9 : 0.5; }

 private:
  explicit RankDevices(const ServeOptions& options) : options_(options) {}

  ServeOptions options_;
  std::vector<CudaDevice> gpus_;  // of the ranks, in order; none: CPU
};

}  // namespace treadle
