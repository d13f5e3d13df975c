// A whole server in this process, over a real channel and HTTP: reference backend, LocalEngine,
// scheduler and service, on a model whose answers depend on every prompt token (PrefixModel). Its
// iterations can be held, so that tests decide what is running and what is queued.
//
// Thread safety: Gate from any thread; the rest from the test's.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/sync.h"
#include "server/grpc/inference.grpc.pb.h"
#include "server/grpc/service.h"
#include "server/observe/ledger_follower.h"
#include "server/observe/metrics.h"
#include "server/openai/openai_server.h"
#include "server/serving_stack.h"

namespace treadle {

// Holds the engine before an iteration while closed.
class Gate {
 public:
  void Close() { Set(0); }
  void Open() { Set(-1); }
  void Allow(int64_t iterations) { Set(iterations); }  // then closed
  void Pass() {
    MutexLock lock(mutex_);
    while (allowed_ == 0) changed_.Wait(mutex_);
    if (allowed_ > 0) --allowed_;
  }

 private:
  void Set(int64_t allowed) {
    MutexLock lock(mutex_);
    allowed_ = allowed;
    changed_.NotifyAll();
  }
  Mutex mutex_;
  CondVar changed_;
  int64_t allowed_ ABSL_GUARDED_BY(mutex_) = -1;  // -1: any number
};

struct TestServerOptions {
  SchedulingOptions scheduling{
      .max_batch_size = 4, .max_batch_tokens = 32, .max_queue = 64, .policy = "fcfs"};
  int64_t max_context = 1024;
  int64_t kv_pages = 256;
  std::chrono::milliseconds stall_timeout{60'000};
  bool gate_closed = false;
  std::string chat_template = {};       // empty: none
  std::vector<std::string> names = {};  // of the model, instead of "prefix"
  std::optional<SamplingParameters> sampling_defaults = {};
  HttpOptions http = {};  // of the OpenAI API
  decltype(ServedModel::tokenizer_files) tokenizer_files = {};
  // Changes the service's options; without one there is no warm-up, so a test's ledger is its own.
  std::function<void(ServiceOptions&)> adjust = {};
  std::shared_ptr<grpc::ChannelCredentials> channel_credentials = {};  // null: plaintext
};

class TestServer {
 public:
  static constexpr int32_t kVocab = 50;

  explicit TestServer(const TestServerOptions& options = {});
  ~TestServer();

  v1::Inference::Stub& stub() { return *stub_; }
  const std::shared_ptr<grpc::Channel>& channel() { return channel_; }
  InferenceServer& server() { return *server_; }
  int http_port() const { return http_->address().port; }
  ServingStack& stack() { return *stack_; }
  Metrics& metrics() { return *metrics_; }
  LedgerFollower& follower() { return *follower_; }
  Gate& gate() { return *gate_; }
  // A connection of its own to the server.
  std::shared_ptr<grpc::Channel> Connect(std::shared_ptr<grpc::ChannelCredentials> credentials);
  // Waits until a probe says so; false if it does not. `address`: of a plaintext port; empty: the
  // server's own.
  bool WaitHealth(const std::string& name, bool serving, const std::string& address = "");

  // Waits for the request's end in the ledger; nothing if it does not come.
  std::optional<LedgerEnd> EndOf(const std::string& request_id);
  // Waits until the pool is as `enough` wants it.
  bool WaitLoad(const std::function<bool(const v1::GetLoadResponse&)>& enough);
  v1::GetLoadResponse Load();

 private:
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::unique_ptr<ServingStack> stack_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<LedgerFollower> follower_;
  std::shared_ptr<HealthBoard> health_;
  std::unique_ptr<InferenceServer> server_;
  std::unique_ptr<HttpServer> http_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

// A request by ids that begins with `first`, so that answers differ.
v1::GenerateRequest MakeRequest(const std::string& id, int32_t first, int32_t prompt_tokens,
                                int32_t new_tokens);

struct StreamOutcome {
  grpc::Status status;
  v1::GenerateResponse all;  // merged: one output per candidate, as Generate gives it
  int messages = 0;
  bool prompt_info_first = true;  // and only there
  bool usage_last = true;         // and only there
};
StreamOutcome ReadAll(grpc::ClientReaderInterface<v1::GenerateResponse>& reader);
StreamOutcome GenerateStream(TestServer& server, const v1::GenerateRequest& request);
grpc::Status Generate(TestServer& server, const v1::GenerateRequest& request,
                      v1::GenerateResponse& response);

// A method by name, with bytes as request and response.
grpc::Status RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const std::string& request, std::string& response);
grpc::Status RawCall(TestServer& server, const std::string& method, const std::string& request,
                     std::string& response);

// The server's port answers an HTTP GET with this.
std::string HttpGet(int port, const std::string& path, const std::string& headers = "");

}  // namespace treadle
