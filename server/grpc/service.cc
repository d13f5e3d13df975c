#include "server/grpc/service.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "base/version.h"
#include "server/gateway/gateway_service.h"
#include "server/gateway/vllm_engine.grpc.pb.h"
#include "server/grpc/calls.h"
#include "server/grpc/inference.grpc.pb.h"
#include "server/grpc/messages.h"
#include "server/grpc/reflection.grpc.pb.h"
#include "server/grpc/reflection.h"
#include "server/grpc/wire_format.h"
#include "server/observe/health.h"
#include "server/openai/tools/reasoning.h"

namespace treadle {
namespace {

// Time for the last bytes of ended calls to leave.
constexpr std::chrono::seconds kFlushTime{2};

// All methods are served raw, so that nothing is parsed uncounted: see wire_format.h.
template <typename Below>
using AdapterMethods = v1::Inference::WithRawCallbackMethod_ListAdapters<
    v1::Inference::WithRawCallbackMethod_LoadAdapter<
        v1::Inference::WithRawCallbackMethod_UnloadAdapter<Below>>>;
using Methods = v1::Inference::WithRawCallbackMethod_Generate<
    v1::Inference::WithRawCallbackMethod_GenerateStream<v1::Inference::WithRawCallbackMethod_Resume<
        v1::Inference::WithRawCallbackMethod_Embed<v1::Inference::WithRawCallbackMethod_Tokenize<
            v1::Inference::WithRawCallbackMethod_Detokenize<
                v1::Inference::WithRawCallbackMethod_GetModelInfo<
                    v1::Inference::WithRawCallbackMethod_GetLoad<
                        v1::Inference::WithRawCallbackMethod_WatchLedger<
                            AdapterMethods<v1::Inference::Service>>>>>>>>>>;

// The first mark of what the model thinks, if chats' prompts have it and their answers the last
// one.
std::string_view ReasoningOpened(const ServedModel& model) {
  if (!model.chat_template || !model.tokenizer) return "";
  const ReasoningFormat* const format = FindReasoningFormat(model.chat_template->source());
  const bool opened = format != nullptr && !ClosesByControlToken(*format, model) &&
                      ThinkingOfChats({}, *format, model) == Thinking::kBegun;
  return opened ? format->open : "";
}

absl::Status NoTokenizer() {
  return absl::FailedPreconditionError("this model has no tokenizer: it serves token ids only");
}

class Service final : public Methods {
 public:
  explicit Service(CallEnvironment& environment) : environment_(environment) {}

  UnaryReactor* Generate(RpcContext* context, const ByteBuffer* request,
                         ByteBuffer* response) override {
    return StartGenerate(environment_, context, request, response);
  }

  StreamReactor* GenerateStream(RpcContext* context, const ByteBuffer* request) override {
    return StartGenerateStream(environment_, context, request);
  }

  StreamReactor* Resume(RpcContext* context, const ByteBuffer* request) override {
    return StartResume(environment_, context, request);
  }

  UnaryReactor* Embed(RpcContext* context, const ByteBuffer* request,
                      ByteBuffer* response) override {
    return StartEmbed(environment_, context, request, response);
  }

  StreamReactor* WatchLedger(RpcContext* context, const ByteBuffer* request) override {
    return StartWatchLedger(environment_, *context, *request);
  }

  UnaryReactor* Tokenize(RpcContext* context, const ByteBuffer* request,
                         ByteBuffer* response) override {
    return Work(context, request->Length(), [this, request, response]() -> absl::Status {
      if (!model().tokenizer) return NoTokenizer();
      v1::TokenizeRequest message;
      TREADLE_RETURN_IF_ERROR(Parse(*request, message));
      const auto ids =
          model().tokenizer->Encode(message.text(), {.add_special = message.add_special()});
      TREADLE_RETURN_IF_ERROR(ids.status());
      v1::TokenizeResponse reply;
      reply.mutable_token_ids()->mutable_ids()->Add(ids->begin(), ids->end());
      *response = Serialize(reply);
      return absl::OkStatus();
    });
  }

  UnaryReactor* Detokenize(RpcContext* context, const ByteBuffer* request,
                           ByteBuffer* response) override {
    return Work(context, request->Length(), [this, request, response]() -> absl::Status {
      if (!model().tokenizer) return NoTokenizer();
      v1::DetokenizeRequest message;
      TREADLE_RETURN_IF_ERROR(Parse(*request, message));
      const auto& ids = message.token_ids().ids();
      const std::span<const int32_t> span(ids.data(), ids.size());
      TREADLE_RETURN_IF_ERROR(ValidateTokenIds("token_ids.ids", span, model().vocab));
      // A text is as long as Tokenize would take it.
      const size_t most = environment_.server->door().limits().http2.message_bytes;
      std::string text = model().tokenizer->Decode(span, /*special=*/true, most);
      if (text.size() > most) {
        return InvalidArgument("token_ids.ids: their text has more than ", most,
                               " bytes (the server's --max-request-bytes), expected fewer ids");
      }
      v1::DetokenizeResponse reply;
      reply.set_text(std::move(text));
      *response = Serialize(reply);
      return absl::OkStatus();
    });
  }

  UnaryReactor* GetModelInfo(RpcContext* context, const ByteBuffer* request,
                             ByteBuffer* bytes) override {
    return ReplyTo<v1::GetModelInfoRequest, v1::GetModelInfoResponse>(
        environment_, context, request, bytes,
        [&](const v1::GetModelInfoRequest&, v1::GetModelInfoResponse* response) {
          response->set_name(model().name);
          for (const std::string& name : model().names) response->add_names(name);
          response->set_architecture(model().architecture);
          response->set_parameters(model().parameters);
          response->set_vocab_size(model().vocab);
          response->set_max_context(static_cast<int32_t>(model().max_context));
          response->set_has_tokenizer(model().tokenizer != nullptr);
          response->set_has_chat_template(model().chat_template.has_value());
          response->set_bos_token_id(model().bos());
          for (int32_t id : model().end_ids) response->add_end_token_ids(id);
          response->set_backend(model().backend);
          response->set_version(kVersion);
          response->set_sha256(model().sha256);
          response->set_reasoning_opened(std::string(ReasoningOpened(model())));
          if (model().sampling_defaults) {
            FillSampling(*model().sampling_defaults, *response->mutable_sampling_defaults());
          }
          return absl::OkStatus();
        });
  }

  UnaryReactor* ListAdapters(RpcContext* context, const ByteBuffer* request,
                             ByteBuffer* bytes) override {
    return ReplyTo<v1::ListAdaptersRequest, v1::ListAdaptersResponse>(
        environment_, context, request, bytes,
        [&](const v1::ListAdaptersRequest&, v1::ListAdaptersResponse* response) {
          if (!model().adapters) return absl::OkStatus();
          for (const AdapterRegistry::Named& named : model().adapters->List()) {
            v1::Adapter& adapter = *response->add_adapters();
            adapter.set_name(named.name);
            adapter.set_sha256(named.hash);
            adapter.set_rank(static_cast<int32_t>(named.rank));
            adapter.set_loaded(named.loaded);
            adapter.set_requests(named.requests);
            adapter.set_running(named.holders);
          }
          return absl::OkStatus();
        });
  }

  UnaryReactor* LoadAdapter(RpcContext* context, const ByteBuffer* request,
                            ByteBuffer* response) override {
    return ChangeAdapters<v1::LoadAdapterRequest, v1::LoadAdapterResponse>(
        context, request, response,
        [](AdapterRegistry& adapters, const v1::LoadAdapterRequest& message) {
          return adapters.Add(message.name(), message.path());
        });
  }

  UnaryReactor* UnloadAdapter(RpcContext* context, const ByteBuffer* request,
                              ByteBuffer* response) override {
    return ChangeAdapters<v1::UnloadAdapterRequest, v1::UnloadAdapterResponse>(
        context, request, response,
        [](AdapterRegistry& adapters, const v1::UnloadAdapterRequest& message) {
          return adapters.Remove(message.name());
        });
  }

  UnaryReactor* GetLoad(RpcContext* context, const ByteBuffer* request,
                        ByteBuffer* bytes) override {
    return ReplyTo<v1::GetLoadRequest, v1::GetLoadResponse>(
        environment_, context, request, bytes,
        [&](const v1::GetLoadRequest&, v1::GetLoadResponse* response) {
          const PoolLoad load = environment_.stack.pool().Load();
          response->set_waiting(load.waiting);
          response->set_running(load.running);
          response->set_reserved(load.reserved);
          response->set_queue_limit(load.queue_limit);
          response->set_draining(load.draining);
          const ServingStack::Pages pages = environment_.stack.pages();
          response->set_kv_pages_total(pages.total);
          response->set_kv_pages_free(pages.free);
          response->set_running_limit(environment_.stack.options().max_batch_size);
          response->set_uptime(
              std::chrono::duration<double>(Clock::now() - environment_.began).count());
          if (!model().adapters) return absl::OkStatus();
          for (const AdapterRegistry::Named& named : model().adapters->List()) {
            if (named.holders > 0) (*response->mutable_adapters())[named.name] = named.holders;
          }
          return absl::OkStatus();
        });
  }

 private:
  const ServedModel& model() const { return environment_.stack.model(); }

  UnaryReactor* Work(RpcContext* context, size_t bytes, Answer answer) {
    return treadle::Work(environment_, context, bytes, std::move(answer));
  }

  template <typename Request, typename Response, typename Change>
  UnaryReactor* ChangeAdapters(RpcContext* context, const ByteBuffer* request, ByteBuffer* response,
                               Change change) {
    return Work(context, request->Length(), [=, this]() -> absl::Status {
      TREADLE_RETURN_IF_ERROR(environment_.sessions.CheckOperator(Authorization(*context)));
      if (!model().adapters) return Unimplemented("this server takes no adapters");
      Request message;
      TREADLE_RETURN_IF_ERROR(Parse(*request, message));
      TREADLE_RETURN_IF_ERROR(change(*model().adapters, message));
      *response = Serialize(Response());
      return absl::OkStatus();
    });
  }

  CallEnvironment& environment_;
};

}  // namespace

struct InferenceServer::State {
  State(ServingStack& stack, LedgerFollower& follower, const ServiceOptions& options)
      : environment{.stack = stack,
                    .follower = follower,
                    .sessions = {.model = stack.model(),
                                 .pool = stack.pool(),
                                 .limits = {.max_batch_size = stack.options().max_candidates,
                                            .default_max_new_tokens =
                                                options.default_max_new_tokens,
                                            .pooling = options.pooling,
                                            .speculate = options.speculate},
                                 .running_limit = stack.options().max_batch_size,
                                 .stall_timeout = options.stream_stall_timeout,
                                 .keys = options.keys,
                                 .request_log = RequestLog(options.request_log, stack.model().name),
                                 .work = options.work,
                                 .store = options.store}},
        service(environment),
        health(options.health ? options.health : std::make_shared<HealthBoard>()),
        gateway_service(MakeGatewayService(environment, *health)),
        reflection_service(MakeReflectionService(
            environment, {v1::Inference::service_full_name(),
                          vllm::grpc::engine::VllmEngine::service_full_name(),
                          grpc::reflection::v1alpha::ServerReflection::service_full_name(),
                          "grpc.health.v1.Health"})) {}

  CallEnvironment environment;
  Service service;
  const std::shared_ptr<HealthBoard> health;
  const std::unique_ptr<grpc::Service> gateway_service, reflection_service;
  std::unique_ptr<GuardedServer> server;
  std::unique_ptr<LoopWatch> watch;
};

absl::StatusOr<std::unique_ptr<InferenceServer>> InferenceServer::Start(
    ServingStack& stack, LedgerFollower& follower, const ServiceOptions& options) {
  auto state = std::make_unique<State>(stack, follower, options);

  // Before anybody else can submit: see LoopWatch.
  state->watch = std::make_unique<LoopWatch>(
      stack, *state->health,
      LoopWatch::Options{.warm_up = options.warm_up, .on_ready = options.on_ready});

  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.RegisterService(&state->service);
  builder.RegisterService(state->gateway_service.get());
  builder.RegisterService(state->reflection_service.get());
  TREADLE_ASSIGN_OR_RETURN(
      state->server, GuardedServer::Listen(builder, options.listen, options.limits, options.tls));
  state->health->Attach(*state->server->server().GetHealthCheckService());
  state->environment.server = state->server.get();
  state->server->Open();
  state->health->Set(Probe::kStarted, true);
  return std::unique_ptr<InferenceServer>(new InferenceServer(std::move(state)));
}

InferenceServer::InferenceServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

InferenceServer::~InferenceServer() { DrainAndStop(std::chrono::milliseconds(0)); }

const Address& InferenceServer::address() const { return state_->server->address(); }

size_t InferenceServer::connections() const { return state_->server->door().limits().connections; }

SessionEnvironment& InferenceServer::sessions() { return state_->environment.sessions; }

void InferenceServer::AddTo(Metrics& metrics) const {
  metrics.Add(state_->server->door().counts());
  metrics.Add(state_->environment.sessions.pool_of_work.counts());
  metrics.Add(state_->environment.sessions.refusals, state_->server->door().counts());
}

bool InferenceServer::DrainAndStop(std::chrono::milliseconds timeout) {
  if (!state_->server) return true;
  CallEnvironment& environment = state_->environment;
  state_->watch->Drain();
  const bool drained = environment.stack.Drain(Clock::now() + timeout);
  state_->watch.reset();  // the loop stops now
  environment.stack.Stop(absl::UnavailableError("the server is shutting down"));

  environment.closing.store(true);
  environment.follower.TellSubscribers();
  environment.sessions.calls.WaitZero(Clock::now() + kFlushTime);
  state_->health->Detach(*state_->server->server().GetHealthCheckService());
  state_->server->Shutdown(std::chrono::milliseconds(100));
  state_->server.reset();
  environment.sessions.pool_of_work.Stop();  // its threads use the services
  return drained;
}

}  // namespace treadle
