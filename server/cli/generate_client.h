// A client of a server's GenerateStream, and the flags that say what it asks for: what `treadle
// generate` and `treadle chat` have in common.
//
// Thread safety: one call at a time; a grpc::ClientContext may be cancelled from any thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/cli/client_flags.h"

namespace CLI {
class App;
}
namespace grpc {
class ClientContext;
}
namespace treadle::v1 {
class GenerateRequest;
class GenerateResponse;
class GetModelInfoResponse;
class ResumeRequest;
}  // namespace treadle::v1

namespace treadle {

inline constexpr char kDefaultTarget[] = "127.0.0.1:50051";

// Flags of a request: how it is sampled, and where its answer ends. `request` outlives the app.
void AddSamplingFlags(CLI::App& app, v1::GenerateRequest& request);
void AddStoppingFlags(CLI::App& app, v1::GenerateRequest& request);

// A flag that sets a field of a message.
template <typename Message, typename T>
std::function<void(const T&)> SetsField(Message& message, void (Message::*set)(T)) {
  return [&message, set](const T& value) { (message.*set)(value); };
}

// Without a temperature: 0 if the model's authors recommend nothing, so that a model says the same
// each time.
void DefaultToGreedy(bool recommended, v1::GenerateRequest& request);

class GenerateClient {
 public:
  // `timeout` 0: calls have no deadline. Errors: files of the flags.
  static absl::StatusOr<GenerateClient> Open(const std::string& target, const ClientFlags& flags,
                                             std::chrono::milliseconds timeout);

  // Errors of calls name the target.
  absl::StatusOr<v1::GetModelInfoResponse> ModelInfo() const;
  // Every message, in order, on this thread. A context is for one call.
  using OnResponse = std::function<void(const v1::GenerateResponse&)>;
  absl::Status Generate(const v1::GenerateRequest& request, grpc::ClientContext& context,
                        const OnResponse& on_response) const;
  absl::Status Resume(const v1::ResumeRequest& request, const OnResponse& on_response) const;

 private:
  struct Server;
  explicit GenerateClient(std::shared_ptr<const Server> server) : server_(std::move(server)) {}

  std::shared_ptr<const Server> server_;
};

}  // namespace treadle
