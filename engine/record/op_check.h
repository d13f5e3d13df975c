// Computes ops a second time, on the reference backend and from the very inputs that the backend
// had, and finds the first result outside of what the number formats allow: which stage, rank,
// layer, op and row.
//
// Inputs are the backend's own, so errors do not add up from op to op, and tolerances are those of
// one op (kernels/op_cases/tolerant_reference.h). A message between ranks or stages is not an
// op. Only for backends whose memory is the host's. Checked ops take as long as plain scalar loops
// do twice; weights take their own memory twice, and four bytes each besides.
//
// Thread safety: OpCheck: all methods from any thread; a backend as Backend.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "base/sync.h"
#include "kernels/backend.h"

namespace treadle {

struct OpFinding {
  int stage = 0;
  int64_t op = 0;  // number of the op within its stage's iteration
  int rank = 0;
  int64_t layer = -1;  // -1: the embedding; the model's number of layers: its head
  std::string name;    // "MatMul"
  int64_t row = 0;     // of the op's output
  std::string what;    // which element, what it is, what it should be

  auto Order() const { return std::tuple(stage, op, rank); }
};

class OpCheck {
 public:
  // Whether ops are checked; between iterations.
  void Arm(bool armed) { armed_ = armed; }
  bool armed() const { return armed_; }

  // The first of an iteration stays.
  void Add(OpFinding finding) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    if (!found_ || finding.Order() < found_->Order()) found_ = std::move(finding);
  }
  std::optional<OpFinding> found() const ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    return found_;
  }

 private:
  std::atomic<bool> armed_ = false;
  mutable Mutex mutex_;
  std::optional<OpFinding> found_ ABSL_GUARDED_BY(mutex_);
};

// A backend that checks the ops of `below`, which computes in the mode `compute`.
class CheckedBackend {
 public:
  virtual ~CheckedBackend() = default;
  // The ops that follow are this layer's. On the rank's thread.
  virtual void AtLayer(int64_t layer) = 0;
};
struct CheckedRank {
  std::unique_ptr<Backend> backend;
  CheckedBackend* check = nullptr;  // the same object
};
CheckedRank CheckOps(std::unique_ptr<Backend> below, ComputeMode compute, OpCheck& check, int stage,
                     int rank);

}  // namespace treadle
