// treadle generate: one request to a server (--target), or to a model in this process (--model).
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <future>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/status.h"
#include "kernels/sampling.h"
#include "net/client_channel.h"
#include "server/cli/client_flags.h"
#include "server/cli/command.h"
#include "server/cli/open_model.h"
#include "server/cli/progress.h"
#include "server/configuration.h"
#include "server/flag_values.h"
#include "server/grpc/inference.grpc.pb.h"
#include "server/grpc/messages.h"
#include "server/grpc/wire_format.h"
#include "server/serving_stack.h"
#include "server/session/session.h"

namespace treadle {
namespace {

constexpr char kDefaultTarget[] = "127.0.0.1:50051";

struct GenerateOptions {
  std::string target;
  ClientFlags access;
  ServeOptions engine;  // with --model
  std::string timeout;

  std::optional<std::string> chat, system, prompt;
  std::vector<int32_t> token_ids;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  v1::GenerateRequest request;  // what the other flags say
  v1::ResumeRequest resume;     // with an id: instead
  bool json = false;
};

// A flag that sets a field of a message.
template <typename Message, typename T>
void AddField(CLI::App& app, const char* flag, Message& message, void (Message::*set)(T),
              const char* text) {
  app.add_option_function<T>(
      flag, [&message, set](const T& value) { (message.*set)(value); }, text);
}

// A flag that sets the field of that name.
void AddSamplingFlag(CLI::App& app, const SamplingField& field, v1::Sampling& sampling) {
  const auto* to = v1::Sampling::descriptor()->FindFieldByName(std::string(field.name));
  std::string flag = "--" + std::string(field.name);
  std::ranges::replace(flag, '_', '-');
  const std::string help(field.help);
  const google::protobuf::Reflection* set = sampling.GetReflection();
  if (std::holds_alternative<float SamplingParameters::*>(field.member)) {
    app.add_option_function<float>(
        flag, [=, &sampling](const float& value) { set->SetFloat(&sampling, to, value); }, help);
  } else {
    app.add_option_function<int32_t>(
        flag, [=, &sampling](const int32_t& value) { set->SetInt32(&sampling, to, value); }, help);
  }
}

void AddRequestFlags(CLI::App& app, GenerateOptions& o) {
  using v1::ResponseOptions;
  using v1::Sampling;
  using v1::Stopping;
  Sampling& sampling = *o.request.mutable_sampling();
  Stopping& stopping = *o.request.mutable_stopping();
  ResponseOptions& response = *o.request.mutable_response();
  sampling.set_num_candidates(1);
  for (const SamplingField& field : kSamplingFields) AddSamplingFlag(app, field, sampling);
  app.get_option("--temperature")
      ->description("0: greedy, the default unless the model's authors recommend otherwise");
  AddField(app, "--seed", sampling, &Sampling::set_seed,
           "seed of sampling; random if absent, and --json shows it");
  AddField(app, "--n", sampling, &Sampling::set_num_candidates, "number of candidates");
  AddField(app, "--max-new-tokens", stopping, &Stopping::set_max_new_tokens,
           "most new tokens; the server's default if absent");
  AddField(app, "--min-new-tokens", stopping, &Stopping::set_min_new_tokens,
           "fewest new tokens: no end before");
  app.add_option("--stop", o.stop, "stop string; may be given several times")
      ->expected(1)
      ->take_all();
  app.add_option("--stop-token-ids", o.stop_token_ids, "ids that end the answer: 1,2,3")
      ->delimiter(',');
  app.add_flag_callback(
      "--ignore-eos", [&stopping] { stopping.set_ignore_eos(true); },
      "go on after the model's end token");
  AddField(app, "--logprobs", response, &ResponseOptions::set_logprobs,
           "alternatives per token, 0 to 20, shown with --json");
  AddField(app, "--prompt-logprobs", response, &ResponseOptions::set_prompt_logprobs,
           "alternatives per prompt token, 0 to 20, shown with --json");
}

void AddFlags(CLI::App& app, GenerateOptions& o) {
  CLI::Option* target =
      app.add_option("--target", o.target, "server, host:port")->default_str(kDefaultTarget);
  AddClientFlags(app, o.access);
  AddServeFlags(app, o.engine, /*engine_only=*/true);
  app.get_option("--model")
      ->description("generate in this process, from a .gguf file or a Hugging Face folder")
      ->excludes(target);
  app.add_option("--timeout", o.timeout, "deadline of the request, such as 30s; none if absent");

  CLI::Option* chat = app.add_option("--chat", o.chat, "the user's message, in the chat template");
  app.add_option("--system", o.system, "system message before --chat")->needs(chat);
  CLI::Option* prompt = app.add_option("--prompt", o.prompt, "prompt as it is");
  CLI::Option* ids = app.add_option("--token-ids", o.token_ids, "prompt as ids: 1,2,3");
  ids->delimiter(',')->excludes(chat)->excludes(prompt);
  prompt->excludes(chat);

  AddRequestFlags(app, o);
  app.add_option_function<std::string>(
      "--request-id", [&o](const std::string& id) { o.request.set_request_id(id); },
      "the request's name, also for --resume");
  CLI::Option* resume = app.add_option_function<std::string>(
      "--resume", [&o](const std::string& id) { o.resume.set_request_id(id); },
      "the rest of this request's answer, from a server with --durable");
  for (CLI::Option* other : {app.get_option("--model"), chat, prompt, ids}) resume->excludes(other);
  AddField(app, "--from", o.resume, &v1::ResumeRequest::set_from_token,
           "number of its tokens that are there already, with --resume");
  app.add_flag("--json", o.json, "print one JSON object instead of text");
}

void AddMessage(const char* role, const std::string& content, v1::Chat& chat) {
  v1::ChatMessage* message = chat.add_messages();
  message->set_role(role);
  message->set_content(content);
}

absl::Status FillPromptAndStops(const GenerateOptions& o, v1::GenerateRequest& request) {
  if (o.chat) {
    if (o.system) AddMessage("system", *o.system, *request.mutable_chat());
    AddMessage("user", *o.chat, *request.mutable_chat());
  } else if (!o.token_ids.empty()) {
    request.mutable_token_ids()->mutable_ids()->Add(o.token_ids.begin(), o.token_ids.end());
  } else if (o.prompt) {
    request.set_text(*o.prompt);
  } else if (isatty(STDIN_FILENO)) {
    return InvalidArgument("no prompt: expected --chat, --prompt, --token-ids, or text on stdin");
  } else {
    request.set_text(
        std::string(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()));
  }
  v1::Stopping& stopping = *request.mutable_stopping();
  stopping.mutable_stop_strings()->Add(o.stop.begin(), o.stop.end());
  stopping.mutable_stop_token_ids()->Add(o.stop_token_ids.begin(), o.stop_token_ids.end());
  return absl::OkStatus();
}

using OnResponse = std::function<void(const v1::GenerateResponse&)>;

// The front end of one caller in this process.
class LocalCall final : public Session {
 public:
  LocalCall(SessionEnvironment& environment, const OnResponse& on_response)
      : Session(environment), on_response_(on_response) {}

  absl::Status Wait() { return ended_.get_future().get(); }

 private:
  bool Write(const SessionEvent& event) override {
    on_response_(ToResponse(event));
    if (event.end) ended_.set_value(absl::OkStatus());
    return true;
  }
  void Fail(const absl::Status& status) override { ended_.set_value(status); }

  const OnResponse& on_response_;
  std::promise<absl::Status> ended_;
};

// A model whose authors recommend nothing answers greedily, so that it says the same each time.
void DefaultToGreedy(bool recommended, v1::GenerateRequest& request) {
  v1::Sampling& sampling = *request.mutable_sampling();
  if (!recommended && !sampling.has_temperature()) sampling.set_temperature(0);
}

// `timeout` 0: no deadline. Both sources give the messages of GenerateStream, in order, on one
// thread.
absl::Status GenerateFromServer(const std::string& target, const ClientAccess& access,
                                std::chrono::milliseconds timeout, v1::GenerateRequest request,
                                const v1::ResumeRequest& resume, const OnResponse& on_response) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  const auto stub = v1::Inference::NewStub(OpenChannel(target, access.credentials, arguments));
  const auto deadline = std::chrono::system_clock::now() + timeout;
  const auto prepare = [&](grpc::ClientContext& context) {
    if (!access.authorization.empty()) context.AddMetadata("authorization", access.authorization);
    if (timeout.count() > 0) context.set_deadline(deadline);
  };
  const auto named = [&target](const absl::Status& status) {
    if (status.ok()) return status;
    return absl::Status(status.code(), Str(target, ": ", status.ToString()));
  };
  grpc::ClientContext context;
  prepare(context);
  const bool fresh = resume.request_id().empty();
  if (fresh && !request.sampling().has_temperature()) {
    grpc::ClientContext asking;
    prepare(asking);
    v1::GetModelInfoResponse model;
    TREADLE_RETURN_IF_ERROR(named(FromGrpcStatus(stub->GetModelInfo(&asking, {}, &model))));
    DefaultToGreedy(model.has_sampling_defaults(), request);
  }
  const auto reader =
      fresh ? stub->GenerateStream(&context, request) : stub->Resume(&context, resume);
  for (v1::GenerateResponse response; reader->Read(&response);) on_response(response);
  return named(FromGrpcStatus(reader->Finish()));
}

absl::Status GenerateInProcess(const ServeOptions& options, std::chrono::milliseconds timeout,
                               v1::GenerateRequest request, const OnResponse& on_response) {
  TREADLE_ASSIGN_OR_RETURN(OpenedModel opened,
                           OpenModel(options, ShowProgress("loading " + options.model)));
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<ServingStack> stack,
                           ServingStack::Create(std::move(opened.served), std::move(opened.engine),
                                                SchedulingFrom(options, opened)));
  TREADLE_RETURN_IF_ERROR(stack->Start());
  SessionEnvironment environment{
      .model = stack->model(),
      .pool = stack->pool(),
      .limits = {.max_batch_size = stack->options().max_candidates,
                 .default_max_new_tokens = static_cast<int32_t>(options.default_max_new_tokens)},
      .request_log = RequestLog({}, stack->model().name)};
  Caller caller;
  if (timeout.count() > 0) caller.deadline = caller.arrival + timeout;
  const auto call = std::make_shared<LocalCall>(environment, on_response);
  DefaultToGreedy(stack->model().sampling_defaults.has_value(), request);
  call->Start(caller, request.ByteSizeLong(), [&] { return ToRequest(request, stack->model()); });
  const absl::Status status = call->Wait();
  call->Release();
  return status;
}

using Json = nlohmann::ordered_json;

Json Logprobs(const google::protobuf::RepeatedPtrField<v1::TokenLogprob>& entries) {
  Json all = Json::array();
  for (const v1::TokenLogprob& entry : entries) {
    Json top = Json::array();
    for (const v1::TopLogprob& other : entry.top()) {
      top.push_back({{"token_id", other.token_id()}, {"logprob", other.logprob()}});
    }
    all.push_back({{"token_id", entry.token_id()}, {"logprob", entry.logprob()}, {"top", top}});
  }
  return all;
}

const char* ReasonOf(const v1::Output& output) {
  const v1::FinishReason reason = output.finish_info().reason();
  if (reason == v1::FINISH_REASON_LENGTH) return "length";
  return reason == v1::FINISH_REASON_STOP ? "stop" : "unknown";
}

Json Candidate(const v1::Output& output) {
  const v1::FinishInfo& end = output.finish_info();
  Json json;
  json["text"] = output.text();
  json["token_ids"] = std::vector<int32_t>(output.token_ids().begin(), output.token_ids().end());
  json["logprobs"] = Logprobs(output.logprobs());
  json["finish_reason"] = ReasonOf(output);
  if (end.has_stop_string()) json["stop_string"] = end.stop_string();
  if (end.has_stop_token_id()) json["stop_token_id"] = end.stop_token_id();
  return json;
}

// One object; `prompt_logprobs`: with those of the prompt.
std::string AnswerToJson(const v1::GenerateResponse& answer, bool prompt_logprobs) {
  Json json = Candidate(answer.output());
  if (prompt_logprobs) {
    json["prompt_logprobs"] = Logprobs(answer.prompt_info().prompt_logprobs());
  }
  json["usage"] = {{"prompt_tokens", answer.usage().prompt_tokens()},
                   {"completion_tokens", answer.usage().completion_tokens()}};
  json["timing"] = {{"queued", answer.timing().queued()},
                    {"first_token", answer.timing().first_token()},
                    {"total", answer.timing().total()}};
  json["seed"] = answer.prompt_info().seed();
  for (const v1::Output& output : answer.more_candidates()) {
    json["more_candidates"].push_back(Candidate(output));
  }
  return json.dump();
}

// A line for each candidate.
void PrintCandidates(const v1::GenerateResponse& answer) {
  std::printf("[0] %s\n", answer.output().text().c_str());
  for (int i = 0; i < answer.more_candidates_size(); ++i) {
    std::printf("[%d] %s\n", i + 1, answer.more_candidates(i).text().c_str());
  }
}

// Tokens and times, in one line on stderr.
void PrintSummary(const v1::GenerateResponse& answer) {
  std::fprintf(stderr, "[%s; %d prompt tokens, first token after %.3f s; %d tokens in %.3f s]\n",
               ReasonOf(answer.output()), answer.usage().prompt_tokens(),
               answer.timing().first_token(), answer.usage().completion_tokens(),
               answer.timing().total());
}

absl::Status Generate(const GenerateOptions& o) {
  std::chrono::milliseconds timeout{0};
  if (!o.timeout.empty()) {
    const auto parsed = ParseDuration(o.timeout);
    if (!parsed.ok()) return InvalidArgument("--timeout ", parsed.status().message());
    timeout = *parsed;
  }
  v1::GenerateRequest request = o.request;
  if (o.resume.request_id().empty()) TREADLE_RETURN_IF_ERROR(FillPromptAndStops(o, request));
  const bool stream = !o.json && request.sampling().num_candidates() <= 1;
  v1::GenerateResponse answer;
  const OnResponse take = [&](const v1::GenerateResponse& next) {
    Append(next, answer);
    if (stream && next.output().candidate() == 0) std::cout << next.output().text() << std::flush;
  };
  const std::string target = o.target.empty() ? kDefaultTarget : o.target;
  TREADLE_ASSIGN_OR_RETURN(const ClientAccess access, OpenAccess(o.access));
  TREADLE_RETURN_IF_ERROR(o.engine.model.empty()
                              ? GenerateFromServer(target, access, timeout, request, o.resume, take)
                              : GenerateInProcess(o.engine, timeout, request, take));
  if (o.json) {
    std::cout << AnswerToJson(answer, request.response().has_prompt_logprobs()) << std::endl;
    return absl::OkStatus();
  }
  if (stream) std::cout << std::endl;
  if (answer.more_candidates_size() > 0) PrintCandidates(answer);
  if (isatty(STDERR_FILENO)) PrintSummary(answer);
  return absl::OkStatus();
}

}  // namespace

int RunGenerate(int argc, char** argv) {
  GenerateOptions options;
  CLI::App app("Generates text from a prompt: --chat, --prompt, --token-ids, or stdin.");
  AddFlags(app, options);
  if (auto code = ParseFlags(app, "generate", argc, argv)) return *code;
  return Finish("generate", Generate(options));
}

}  // namespace treadle
