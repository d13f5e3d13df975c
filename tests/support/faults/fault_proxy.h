// Stands where a worker's control address is expected and passes everything on to the worker, but
// for the faults that a test injects: messages of one kind, in one direction, that are lost, late,
// doubled, swapped with the next, cut short, or at which the connection breaks.
//
// Thread safety: all methods from any thread.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace treadle {

struct MessageFault {
  enum class Kind { kDrop, kDelay, kDuplicate, kReorder, kTruncate, kCut };
  enum class Where { kToWorker, kFromWorker };
  Kind kind = Kind::kDrop;
  Where where = Where::kToWorker;
  // Name of the message in control.proto's oneof: "plan", "result", "begin_epoch" ...
  std::string message;
  int skip = 0;                        // so many of that name pass first
  std::chrono::milliseconds delay{0};  // kDelay: of this message and those behind it
};

class FaultProxy {
 public:
  static absl::StatusOr<std::unique_ptr<FaultProxy>> Start(const std::string& worker);
  virtual ~FaultProxy() = default;

  virtual const std::string& address() const = 0;
  virtual void Inject(const MessageFault& fault) = 0;
  // Faults that were injected and have happened.
  virtual int happened() const = 0;
};

}  // namespace treadle
