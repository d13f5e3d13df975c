#include "engine/remote/worker_session.h"

#include <string>
#include <utility>

#include "engine/remote/control.pb.h"

namespace treadle {

void Session::Send(control::WorkerMessage&& message) { stream->Send(std::move(message)); }

void Session::Fail(uint64_t epoch, const absl::Status& status) { Send(FailureOf(epoch, status)); }

control::WorkerMessage FailureOf(uint64_t epoch, const absl::Status& why) {
  control::WorkerMessage message;
  control::Failed& failed = *message.mutable_failed();
  failed.set_epoch(epoch);
  failed.set_code(static_cast<int>(why.code()));
  failed.set_message(std::string(why.message()));
  return message;
}

}  // namespace treadle
