#include "server/gateway/gateway_service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <limits>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/version.h"
#include "server/gateway/gateway_generate.h"
#include "server/gateway/gateway_messages.h"
#include "server/gateway/kv_event_call.h"
#include "server/gateway/tokenizer_archive.h"
#include "server/gateway/vllm_engine.grpc.pb.h"
#include "server/grpc/wire_format.h"

namespace treadle {
namespace {

namespace engine = ::vllm::grpc::engine;
namespace common = ::smg::grpc::common;

// All methods are served raw, so that nothing is parsed uncounted: see wire_format.h.
using Methods = engine::VllmEngine::WithRawCallbackMethod_Generate<
    engine::VllmEngine::WithRawCallbackMethod_Embed<engine::VllmEngine::WithRawCallbackMethod_Abort<
        engine::VllmEngine::WithRawCallbackMethod_HealthCheck<
            engine::VllmEngine::WithRawCallbackMethod_GetModelInfo<
                engine::VllmEngine::WithRawCallbackMethod_GetServerInfo<
                    engine::VllmEngine::WithRawCallbackMethod_GetLoads<
                        engine::VllmEngine::WithRawCallbackMethod_GetTokenizer<
                            engine::VllmEngine::WithRawCallbackMethod_FlushCache<
                                engine::VllmEngine::WithRawCallbackMethod_SubscribeKvEvents<
                                    engine::VllmEngine::Service>>>>>>>>>>;

constexpr int kMaxAborts = 1024;  // of one call

// Cuts a count to the 32 bits that the protocol has for it.
int32_t Fit(int64_t count) {
  return static_cast<int32_t>(std::min<int64_t>(count, std::numeric_limits<int32_t>::max()));
}

class EmbedAnswer final : public UnaryAnswer {
 public:
  explicit EmbedAnswer(const ServedModel& model) : model_(model) {}
  absl::StatusOr<GenerateRequest> Read(const ByteBuffer& request) override {
    engine::EmbedRequest message;
    TREADLE_RETURN_IF_ERROR(
        Parse(request, message, [this](std::string_view field, int64_t entries) {
          return ValidateGatewayEntries(field, entries, /*embedding=*/true, model_);
        }));
    return ToRequest(message);
  }
  void Add(const SessionEvent& event) override { treadle::Add(event, message_); }
  ByteBuffer Bytes() const override { return Serialize(message_); }
  absl::Status Named(const absl::Status& status) const override { return InGatewayNames(status); }

 private:
  const ServedModel& model_;
  engine::EmbedResponse message_;
};

class GatewayService final : public Methods {
 public:
  GatewayService(CallEnvironment& environment, const HealthBoard& health)
      : environment_(environment), health_(health) {}

  StreamReactor* Generate(RpcContext* context, const ByteBuffer* request) override {
    return StartGatewayGenerate(environment_, calls_, context, request);
  }

  UnaryReactor* Embed(RpcContext* context, const ByteBuffer* request,
                      ByteBuffer* response) override {
    return StartUnary(environment_, context, request, response,
                      std::make_unique<EmbedAnswer>(environment_.sessions.model));
  }

  UnaryReactor* Abort(RpcContext* context, const ByteBuffer* request, ByteBuffer* bytes) override {
    return ReplyTo<engine::AbortRequest, engine::AbortResponse>(
        environment_, context, request, bytes,
        [&](const engine::AbortRequest& message, engine::AbortResponse*) -> absl::Status {
          TREADLE_ASSIGN_OR_RETURN(const std::string owner,
                                   environment_.sessions.OwnerOf(Authorization(*context)));
          for (const std::string& id : message.request_ids()) {
            AbortGatewayCalls(calls_, {owner, id});
          }
          return absl::OkStatus();
        },
        [](std::string_view field, int64_t entries) {
          if (entries <= kMaxAborts) return absl::OkStatus();
          return InvalidArgument(field, " has ", entries, " entries, expected at most ",
                                 kMaxAborts);
        });
  }

  // Nothing is asked in it, and no key is needed: it is not parsed.
  UnaryReactor* HealthCheck(RpcContext* context, const ByteBuffer*, ByteBuffer* bytes) override {
    const bool ready = health_.Get(Probe::kReady);
    engine::HealthCheckResponse response;
    response.set_healthy(ready);
    response.set_message(ready ? "ready"
                               : "not ready: still warming up, draining, or without an "
                                 "engine");
    *bytes = Serialize(response);
    UnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  UnaryReactor* GetModelInfo(RpcContext* context, const ByteBuffer* request,
                             ByteBuffer* bytes) override {
    return ReplyTo<engine::GetModelInfoRequest, engine::GetModelInfoResponse>(
        environment_, context, request, bytes,
        [&](const engine::GetModelInfoRequest&, engine::GetModelInfoResponse* response) {
          const ServedModel& model = environment_.stack.model();
          // A gateway looks there for a tokenizer, then for that name on the network, and asks
          // GetTokenizer last: so it is a path that nobody has.
          response->set_model_path("/" + model.name);
          response->set_served_model_name(model.name);
          response->set_model_type(model.architecture);
          response->set_is_generation(true);
          response->set_vocab_size(static_cast<uint32_t>(model.vocab));
          response->set_max_context_length(static_cast<uint32_t>(Fit(model.max_context)));
          response->set_max_req_input_len(Fit(model.max_context - 1));
          for (const int32_t id : model.end_ids) response->add_eos_token_ids(id);
          response->set_bos_token_id(std::max(0, model.bos()));
          if (model.tokenizer) {
            response->set_pad_token_id(std::max(0, model.tokenizer->spec().padding));
          }
          return absl::OkStatus();
        });
  }

  UnaryReactor* GetServerInfo(RpcContext* context, const ByteBuffer* request,
                              ByteBuffer* bytes) override {
    return ReplyTo<engine::GetServerInfoRequest, engine::GetServerInfoResponse>(
        environment_, context, request, bytes,
        [&](const engine::GetServerInfoRequest&, engine::GetServerInfoResponse* response) {
          const PoolLoad load = environment_.stack.pool().Load();
          response->set_active_requests(static_cast<uint32_t>(Fit(load.running + load.waiting)));
          response->set_is_paused(load.draining);
          const Clock::duration uptime = Clock::now() - environment_.began;
          response->set_uptime_seconds(std::chrono::duration<double>(uptime).count());
          response->set_server_type("vllm-grpc");
          response->set_data_parallel_size(1);
          response->set_block_size(Fit(environment_.stack.model().paging.page_size));
          response->set_max_num_seqs(Fit(environment_.stack.options().max_batch_size));
          return absl::OkStatus();
        });
  }

  UnaryReactor* GetLoads(RpcContext* context, const ByteBuffer* request,
                         ByteBuffer* bytes) override {
    return ReplyTo<engine::GetLoadsRequest, engine::GetLoadsResponse>(
        environment_, context, request, bytes,
        [&](const engine::GetLoadsRequest& message, engine::GetLoadsResponse* response) {
          response->set_timestamp(
              absl::FormatTime(absl::RFC3339_full, absl::Now(), absl::UTCTimeZone()));
          response->set_version(kVersion);
          response->set_dp_rank_count(1);
          if (message.dp_rank() == 0) FillLoad(*response->add_loads());
          return absl::OkStatus();
        });
  }

  StreamReactor* GetTokenizer(RpcContext* context, const ByteBuffer*) override {
    return StartGetTokenizer(environment_, tokenizer_, context);
  }

  UnaryReactor* FlushCache(RpcContext* context, const ByteBuffer* request,
                           ByteBuffer* bytes) override {
    return ReplyTo<common::FlushCacheRequest, common::FlushCacheResponse>(
        environment_, context, request, bytes,
        [&](const common::FlushCacheRequest&, common::FlushCacheResponse* response) {
          environment_.sessions.pool.ForgetCached();
          response->set_success(true);
          response->set_message("the prefix cache forgets what ended requests left in it");
          return absl::OkStatus();
        });
  }

  StreamReactor* SubscribeKvEvents(RpcContext* context, const ByteBuffer* request) override {
    return StartSubscribeKvEvents(environment_, kv_subscribers_, *context, *request);
  }

 private:
  void FillLoad(engine::SchedulerLoad& to) const {
    const ServedModel& model = environment_.stack.model();
    const PoolLoad load = environment_.stack.pool().Load();
    to.set_num_running_reqs(Fit(load.running));
    to.set_num_waiting_reqs(Fit(load.waiting));
    to.set_num_total_reqs(Fit(load.running + load.waiting));
    const auto [free, total] = environment_.stack.pages();
    to.set_num_used_tokens(Fit((total - free) * model.paging.page_size));
    to.set_max_total_num_tokens(Fit(total * model.paging.page_size));
    to.set_token_usage(static_cast<double>(total - free) / static_cast<double>(total));
    to.set_max_running_requests(Fit(environment_.stack.options().max_batch_size));
  }

  CallEnvironment& environment_;
  const HealthBoard& health_;
  NamedCalls calls_;
  const std::shared_ptr<void> kv_subscribers_ = std::make_shared<char>();
  TokenizerArchive tokenizer_{environment_.stack.model()};
};

}  // namespace

std::unique_ptr<grpc::Service> MakeGatewayService(CallEnvironment& environment,
                                                  const HealthBoard& health) {
  return std::make_unique<GatewayService>(environment, health);
}

}  // namespace treadle
