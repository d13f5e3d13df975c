#include "tests/server/test_server.h"

#include <arpa/inet.h>
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <utility>

#include "base/status.h"
#include "engine/local_engine.h"
#include "kernels/reference/reference_backend.h"
#include "server/grpc/messages.h"
#include "server/http_routes.h"
#include "tests/server/letter_tokenizer.h"
#include "tests/support/in_time.h"
#include "tests/support/prefix_model.h"
#include "tests/support/ranks/one_rank.h"

namespace treadle {
namespace {

constexpr std::chrono::seconds kPatience{60};

ServedModel Describe(const TestServerOptions& options) {
  ServedModel model;
  model.name = "prefix";
  model.architecture = "prefix";
  model.backend = "reference";
  model.fingerprint = "fp_0123456789";
  model.parameters = 1;
  model.vocab = TestServer::kVocab;
  model.max_context = options.max_context;
  model.kv_pages = options.kv_pages;
  model.paging.page_size = 16;
  model.tokenizer = LetterTokenizer::Make(TestServer::kVocab);
  model.end_ids = model.tokenizer->spec().end_ids;
  model.constraints =
      ConstraintCompiler::Create(*model.tokenizer, TestServer::kVocab, model.end_ids);
  model.tokenizer_files = options.tokenizer_files;
  model.hidden = 8;
  model.names = options.names;
  if (!model.names.empty()) model.name = model.names.front();
  model.sampling_defaults = options.sampling_defaults;
  if (!options.chat_template.empty()) {
    auto parsed = ChatTemplate::Parse(options.chat_template).value();
    model.chat_template = std::move(parsed);
  }
  return model;
}

std::unique_ptr<Engine> MakeEngine(const TestServerOptions& options, std::shared_ptr<Gate> gate) {
  auto model = std::make_unique<PrefixModel>(TestServer::kVocab, options.max_context);
  PrefixModel& prefix = *model;
  prefix.before_forward = [gate, &prefix] {
    prefix.calls.clear();
    prefix.head_rows.clear();
    gate->Pass();
  };
  LocalEngineOptions engine;
  engine.max_batch_tokens = options.scheduling.max_batch_tokens;
  engine.page_size = 16;
  engine.kv_pages = options.kv_pages;
  engine.kv_dtype = DType::kF32;
  return OneRankEngine(CreateReferenceBackend(), std::move(model), engine).value();
}

}  // namespace

TestServer::TestServer(const TestServerOptions& options) {
  if (options.gate_closed) gate_->Close();
  auto stack =
      ServingStack::Create(Describe(options), MakeEngine(options, gate_), options.scheduling)
          .value();
  stack_ = std::move(stack);
  metrics_ = std::make_unique<Metrics>("prefix", stack_->pool());
  follower_ = std::make_unique<LedgerFollower>(
      stack_->ledger(),
      std::vector<LedgerFollower::Sink>{
          [this](const LedgerRecord& record, uint64_t) { metrics_->Record(record); }});
  TREADLE_CHECK(stack_->Start().ok());
  ServiceOptions service;
  service.stream_stall_timeout = options.stall_timeout;
  service.warm_up = false;
  if (options.adjust) options.adjust(service);
  if (!service.health) service.health = std::make_shared<HealthBoard>();
  health_ = service.health;
  auto server = InferenceServer::Start(*stack_, *follower_, service).value();
  server_ = std::move(server);
  auto http = StartOpenAi("127.0.0.1:0", options.http, server_->sessions(), *health_,
                          RoutesBesideOpenAi(*follower_, server_->sessions()))
                  .value();
  http_ = std::move(http);
  channel_ = Connect(options.channel_credentials ? options.channel_credentials
                                                 : grpc::InsecureChannelCredentials());
  stub_ = v1::Inference::NewStub(channel_);
}

std::shared_ptr<grpc::Channel> TestServer::Connect(
    std::shared_ptr<grpc::ChannelCredentials> credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A reader that does not read lets 64 KB in, and no more.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65536);
  return grpc::CreateCustomChannel(ToString(server_->address()), credentials, arguments);
}

bool TestServer::WaitHealth(const std::string& name, bool serving, const std::string& address) {
  const auto channel =
      address.empty() ? channel_ : grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  const std::string request =
      name.empty() ? "" : std::string("\x0A") + static_cast<char>(name.size()) + name;
  return ComesTrue([&] {
    std::string reply;
    return RawCall(channel, "/grpc.health.v1.Health/Check", request, reply).ok() &&
           reply == (serving ? "\x08\x01" : "\x08\x02");
  });
}

TestServer::~TestServer() {
  gate_->Open();
  stub_.reset();
  channel_.reset();
  http_.reset();
  server_.reset();
  follower_.reset();
}

std::optional<LedgerEnd> TestServer::EndOf(const std::string& request_id) {
  const auto deadline = Clock::now() + kPatience;
  uint64_t next = 0;
  uint64_t lost = 0;
  while (stack_->ledger().WaitFor(next, deadline)) {
    for (const auto& record : stack_->ledger().Read(next, 1000, lost)) {
      for (const LedgerEnd& end : record->ends) {
        if (end.client_id == request_id) return end;
      }
    }
  }
  return std::nullopt;
}

v1::GetLoadResponse TestServer::Load() {
  grpc::ClientContext context;
  v1::GetLoadResponse load;
  TREADLE_CHECK(stub_->GetLoad(&context, {}, &load).ok());
  return load;
}

bool TestServer::WaitLoad(const std::function<bool(const v1::GetLoadResponse&)>& enough) {
  const auto deadline = Clock::now() + kPatience;
  while (Clock::now() < deadline) {
    if (enough(Load())) return true;
    stack_->ledger().WaitFor(stack_->ledger().end(), Clock::now() + std::chrono::milliseconds(20));
  }
  return false;
}

v1::GenerateRequest MakeRequest(const std::string& id, int32_t first, int32_t prompt_tokens,
                                int32_t new_tokens) {
  v1::GenerateRequest request;
  request.set_request_id(id);
  for (int32_t i = 0; i < prompt_tokens; ++i) {
    request.mutable_token_ids()->add_ids((first + 7 * i) % TestServer::kVocab);
  }
  request.mutable_sampling()->set_seed(first);
  request.mutable_stopping()->set_max_new_tokens(new_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

StreamOutcome ReadAll(grpc::ClientReaderInterface<v1::GenerateResponse>& reader) {
  StreamOutcome outcome;
  v1::GenerateResponse& all = outcome.all;
  for (v1::GenerateResponse message; reader.Read(&message);) {
    outcome.prompt_info_first &= message.has_prompt_info() == (outcome.messages == 0);
    outcome.usage_last &= !all.has_usage();
    ++outcome.messages;
    Append(message, all);
  }
  outcome.status = reader.Finish();
  outcome.usage_last &= all.has_usage();
  return outcome;
}

StreamOutcome GenerateStream(TestServer& server, const v1::GenerateRequest& request) {
  grpc::ClientContext context;
  const auto reader = server.stub().GenerateStream(&context, request);
  return ReadAll(*reader);
}

grpc::Status Generate(TestServer& server, const v1::GenerateRequest& request,
                      v1::GenerateResponse& response) {
  grpc::ClientContext context;
  return server.stub().Generate(&context, request, &response);
}

grpc::Status RawCall(TestServer& server, const std::string& method, const std::string& request,
                     std::string& response) {
  return RawCall(server.channel(), method, request, response);
}

grpc::Status RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const std::string& request, std::string& response) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  const grpc::Slice slice(request);
  grpc::ByteBuffer in(&slice, 1);
  grpc::ByteBuffer out;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, method, grpc::StubOptions(), &in, &out,
                 [&](grpc::Status status) { done.set_value(std::move(status)); });
  grpc::Status status = done.get_future().get();
  std::vector<grpc::Slice> slices;
  if (status.ok() && out.Dump(&slices).ok()) {
    response.clear();
    for (const grpc::Slice& part : slices) {
      response.append(reinterpret_cast<const char*>(part.begin()), part.size());
    }
  }
  return status;
}

std::string HttpGet(int port, const std::string& path, const std::string& headers) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string reply;
  const std::string request = "GET " + path + " HTTP/1.0\r\n" + headers + "\r\n";
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
      write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
    char buffer[4096];
    for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;) reply.append(buffer, n);
  }
  close(fd);
  return reply;
}

}  // namespace treadle
