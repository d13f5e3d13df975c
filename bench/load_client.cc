#include "bench/load_client.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <memory>
#include <random>
#include <thread>

#include "kernels/status.h"
#include "kernels/sync.h"
#include "server/inference.grpc.pb.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

std::shared_ptr<grpc::Channel> Connect(const LoadClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(
      options.target,
      options.credentials ? options.credentials : grpc::InsecureChannelCredentials(), arguments);
}

void Authorize(const LoadClientOptions& options, grpc::ClientContext& context) {
  if (!options.authorization.empty()) context.AddMetadata("authorization", options.authorization);
}

// Requests under way, and how many have ended.
class Tally {
 public:
  void WaitBelow(int64_t limit) {
    MutexLock lock(mutex_);
    while (limit > 0 && started_ - ended_ >= limit) changed_.Wait(mutex_);
    ++started_;
  }
  void Ended() {
    MutexLock lock(mutex_);
    ++ended_;
    changed_.NotifyAll();
  }
  // Waits for all `total` to end; calls `progress` after each change.
  void WaitEnded(int64_t total, const std::function<void(int64_t, int64_t)>& progress) {
    for (int64_t seen = -1; seen < total;) {
      {
        MutexLock lock(mutex_);
        while (ended_ == seen) changed_.Wait(mutex_);
        seen = ended_;
      }
      if (progress) progress(seen, total);
    }
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int64_t started_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
};

// One streaming call; lives until OnDone.
class StreamingCall final : public grpc::ClientReadReactor<treadle::v1::GenerateResponse> {
 public:
  StreamingCall(treadle::v1::Inference::Stub& stub, treadle::v1::GenerateRequest request,
                const LoadClientOptions& options, SteadyClock::time_point start,
                RequestRecord& record, Tally& tally)
      : request_(std::move(request)), start_(start), record_(record), tally_(tally) {
    context_.set_deadline(std::chrono::system_clock::now() + options.request_timeout);
    Authorize(options, context_);
    stub.async()->GenerateStream(&context_, &request_, this);
    StartRead(&reply_);
    StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    const double now = Now();
    const int tokens = reply_.output().token_ids_size();
    record_.token_times.insert(record_.token_times.end(), tokens, now);
    record_.output_tokens += tokens;
    StartRead(&reply_);
  }

  void OnDone(const grpc::Status& status) override {
    record_.end = Now();
    if (!status.ok()) {
      record_.error =
          Str("code ", static_cast<int>(status.error_code()), ": ", status.error_message());
    }
    Tally& tally = tally_;
    delete this;
    tally.Ended();
  }

 private:
  double Now() const { return std::chrono::duration<double>(SteadyClock::now() - start_).count(); }

  grpc::ClientContext context_;
  treadle::v1::GenerateRequest request_;
  treadle::v1::GenerateResponse reply_;
  const SteadyClock::time_point start_;
  RequestRecord& record_;
  Tally& tally_;
};

treadle::v1::GenerateRequest MakeRequest(const TraceEntry& entry, const LoadClientOptions& options,
                                         int32_t vocab, std::mt19937_64& random) {
  treadle::v1::GenerateRequest request;
  for (int32_t i = 0; i < entry.input_tokens; ++i) {
    request.mutable_token_ids()->add_ids(static_cast<int32_t>(random() % vocab));
  }
  request.mutable_sampling()->set_temperature(options.temperature);
  request.mutable_stopping()->set_max_new_tokens(entry.output_tokens);
  request.mutable_stopping()->set_ignore_eos(options.ignore_eos);
  return request;
}

absl::StatusOr<treadle::v1::GetModelInfoResponse> ModelInfo(treadle::v1::Inference::Stub& stub,
                                                            const LoadClientOptions& options,
                                                            std::chrono::seconds timeout) {
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  Authorize(options, context);
  treadle::v1::GetModelInfoResponse info;
  const grpc::Status status = stub.GetModelInfo(&context, {}, &info);
  if (!status.ok()) {
    return absl::UnavailableError(
        Str(options.target, ": no Treadle server answers there (", status.error_message(), ")"));
  }
  return info;
}

}  // namespace

absl::Status WaitReady(const LoadClientOptions& options, std::chrono::seconds timeout) {
  const auto stub = treadle::v1::Inference::NewStub(Connect(options));
  return ModelInfo(*stub, options, timeout).status();
}

absl::StatusOr<LoadResult> Replay(const std::vector<TraceEntry>& trace,
                                  const LoadClientOptions& options) {
  const auto stub = treadle::v1::Inference::NewStub(Connect(options));
  TREADLE_ASSIGN_OR_RETURN(const treadle::v1::GetModelInfoResponse info,
                           ModelInfo(*stub, options, std::chrono::seconds(10)));
  for (const TraceEntry& entry : trace) {
    if (int64_t{entry.input_tokens} + entry.output_tokens > info.max_context()) {
      return InvalidArgument("the trace has a request of ", entry.input_tokens, " + ",
                             entry.output_tokens, " tokens, the server's context is ",
                             info.max_context());
    }
  }
  std::mt19937_64 random(options.seed);
  std::vector<treadle::v1::GenerateRequest> requests;
  LoadResult result;
  for (const TraceEntry& entry : trace) {
    requests.push_back(MakeRequest(entry, options, info.vocab_size(), random));
    RequestRecord record;
    record.scheduled = entry.arrival;
    record.input_tokens = entry.input_tokens;
    record.token_times.reserve(entry.output_tokens);
    result.requests.push_back(std::move(record));
  }

  Tally tally;
  const SteadyClock::time_point start = SteadyClock::now();
  std::thread dispatcher([&] {
    for (size_t i = 0; i < trace.size(); ++i) {
      std::this_thread::sleep_until(start + std::chrono::duration_cast<SteadyClock::duration>(
                                                std::chrono::duration<double>(trace[i].arrival)));
      tally.WaitBelow(options.max_concurrency);
      new StreamingCall(*stub, std::move(requests[i]), options, start, result.requests[i], tally);
    }
  });
  tally.WaitEnded(static_cast<int64_t>(trace.size()), options.progress);
  dispatcher.join();
  for (const RequestRecord& record : result.requests) {
    result.duration = std::max(result.duration, record.end);
  }
  return result;
}

}  // namespace treadle
