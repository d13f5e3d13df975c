// treadle generate: one request to a server (--target), or to a model in this process (--model).
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <future>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/cli/command.h"
#include "server/cli/generate_client.h"
#include "server/cli/open_model.h"
#include "server/configuration.h"
#include "server/flag_values.h"
#include "server/grpc/inference.grpc.pb.h"
#include "server/grpc/messages.h"
#include "server/serving_stack.h"
#include "server/session/session.h"

namespace treadle {
namespace {

struct GenerateOptions {
  std::string target;
  ClientFlags access;
  ServeOptions engine;  // with --model
  std::string timeout;

  std::optional<std::string> chat, system, prompt;
  std::vector<int32_t> token_ids;
  v1::GenerateRequest request;
  v1::ResumeRequest resume;  // with an id: instead
  bool json = false;
};

void AddRequestFlags(CLI::App& app, GenerateOptions& o) {
  v1::GenerateRequest& request = o.request;
  v1::Sampling& sampling = *request.mutable_sampling();
  v1::ResponseOptions& response = *request.mutable_response();
  AddSamplingFlags(app, o.request);
  sampling.set_num_candidates(1);
  app.add_option_function<int32_t>("--n", SetsField(sampling, &v1::Sampling::set_num_candidates),
                                   "number of candidates");
  AddStoppingFlags(app, o.request);
  app.option_defaults()->group("Output");
  app.add_flag("--json", o.json, "print one JSON object instead of text, with the seed");
  app.add_option_function<int32_t>("--logprobs",
                                   SetsField(response, &v1::ResponseOptions::set_logprobs),
                                   "alternatives per token, 0 to 20, shown with --json");
  app.add_option_function<int32_t>("--prompt-logprobs",
                                   SetsField(response, &v1::ResponseOptions::set_prompt_logprobs),
                                   "alternatives per prompt token, 0 to 20, shown with --json");
}

void AddFlags(CLI::App& app, GenerateOptions& o) {
  app.option_defaults()->group("Prompt");
  CLI::Option* chat = app.add_option("--chat", o.chat, "the user's message, in the chat template");
  app.add_option("--system", o.system, "system message before --chat")->needs(chat);
  CLI::Option* prompt = app.add_option("--prompt", o.prompt, "prompt as it is");
  CLI::Option* ids = app.add_option("--token-ids", o.token_ids, "prompt as ids: 1,2,3");
  ids->delimiter(',')->excludes(chat)->excludes(prompt);
  prompt->excludes(chat);

  app.option_defaults()->group("Server");
  CLI::Option* target =
      app.add_option("--target", o.target, "server, host:port")->default_str(kDefaultTarget);
  AddClientFlags(app, o.access);
  app.add_option("--timeout", o.timeout, "deadline of the request, such as 30s; none if absent");
  app.add_option_function<std::string>(
      "--request-id", [&o](const std::string& id) { o.request.set_request_id(id); },
      "the request's name, also for --resume");
  CLI::Option* resume = app.add_option_function<std::string>(
      "--resume", [&o](const std::string& id) { o.resume.set_request_id(id); },
      "the rest of this request's answer, from a server with --durable");
  app.add_option_function<int32_t>("--from",
                                   SetsField(o.resume, &v1::ResumeRequest::set_from_token),
                                   "number of its tokens that are there already, with --resume");

  AddRequestFlags(app, o);
  AddServeFlags(app, o.engine, /*engine_only=*/true);
  CLI::Option* const model = app.get_option("--model")->excludes(target);
  model->description("generate in this process, from a .gguf file or a Hugging Face folder");
  for (CLI::Option* other : {model, chat, prompt, ids}) resume->excludes(other);
}

void AddMessage(const char* role, const std::string& content, v1::Chat& chat) {
  v1::ChatMessage* message = chat.add_messages();
  message->set_role(role);
  message->set_content(content);
}

void FillPrompt(const GenerateOptions& o, v1::GenerateRequest& request) {
  if (o.chat) {
    if (o.system) AddMessage("system", *o.system, *request.mutable_chat());
    AddMessage("user", *o.chat, *request.mutable_chat());
  } else if (!o.token_ids.empty()) {
    request.mutable_token_ids()->mutable_ids()->Add(o.token_ids.begin(), o.token_ids.end());
  } else if (o.prompt) {
    request.set_text(*o.prompt);
  } else {
    if (isatty(STDIN_FILENO) != 0) {
      std::fputs("Type the prompt; Ctrl-D at the beginning of a line ends it.\n", stderr);
    }
    request.set_text(
        std::string(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()));
  }
}

using OnResponse = GenerateClient::OnResponse;

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

absl::Status GenerateFromServer(const GenerateClient& client, v1::GenerateRequest request,
                                const OnResponse& on_response) {
  if (!request.sampling().has_temperature()) {
    TREADLE_ASSIGN_OR_RETURN(const v1::GetModelInfoResponse model, client.ModelInfo());
    DefaultToGreedy(model.has_sampling_defaults(), request);
  }
  grpc::ClientContext context;
  return client.Generate(request, context, on_response);
}

// `timeout` 0: no deadline. As GenerateClient: every message in order, on one thread.
absl::Status GenerateInProcess(const ServeOptions& options, std::chrono::milliseconds timeout,
                               v1::GenerateRequest request, const OnResponse& on_response) {
  TREADLE_ASSIGN_OR_RETURN(OpenedModel opened, OpenModel(options));
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
  const bool resume = !o.resume.request_id().empty();
  if (!resume) FillPrompt(o, request);
  const bool stream = !o.json && request.sampling().num_candidates() <= 1;
  v1::GenerateResponse answer;
  const OnResponse take = [&](const v1::GenerateResponse& next) {
    Append(next, answer);
    if (stream && next.output().candidate() == 0) std::cout << next.output().text() << std::flush;
  };
  if (o.engine.model.empty()) {
    TREADLE_ASSIGN_OR_RETURN(
        const GenerateClient client,
        GenerateClient::Open(o.target.empty() ? kDefaultTarget : o.target, o.access, timeout));
    TREADLE_RETURN_IF_ERROR(resume ? client.Resume(o.resume, take)
                                   : GenerateFromServer(client, request, take));
  } else {
    TREADLE_RETURN_IF_ERROR(GenerateInProcess(o.engine, timeout, request, take));
  }
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
