// treadle generate: one request to a server (--target), or to a model in this process (--model).
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/cli/answer_printer.h"
#include "server/cli/client_flags.h"
#include "server/cli/command.h"
#include "server/cli/generate_source.h"
#include "server/configuration.h"
#include "server/flag_values.h"
#include "server/grpc/inference.pb.h"

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

  float temperature = 0;
  std::optional<int32_t> top_k;
  std::optional<float> top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<uint64_t> seed;
  int32_t candidates = 1;
  std::optional<int32_t> max_new_tokens, min_new_tokens;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  std::optional<int32_t> logprobs, prompt_logprobs;
  bool json = false;
};

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

  app.add_option("--temperature", o.temperature, "0: greedy");
  app.add_option("--top-k", o.top_k, "sample from the k best tokens");
  app.add_option("--top-p", o.top_p, "sample from the best tokens of this total probability");
  app.add_option("--min-p", o.min_p, "drop tokens below this share of the best one's probability");
  app.add_option("--repetition-penalty", o.repetition_penalty, "1: none");
  app.add_option("--presence-penalty", o.presence_penalty, "-2 to 2");
  app.add_option("--frequency-penalty", o.frequency_penalty, "-2 to 2");
  app.add_option("--seed", o.seed, "random if absent; --json shows it");
  app.add_option("--n", o.candidates, "candidates");
  app.add_option("--max-new-tokens", o.max_new_tokens, "the server's default if absent");
  app.add_option("--min-new-tokens", o.min_new_tokens, "no end before so many tokens");
  app.add_option("--stop", o.stop, "stop string; may be given several times")
      ->expected(1)
      ->take_all();
  app.add_option("--stop-token-ids", o.stop_token_ids, "1,2,3")->delimiter(',');
  app.add_flag("--ignore-eos", o.ignore_eos, "go on after the model's end token");
  app.add_option("--logprobs", o.logprobs, "with --json: alternatives per token, 0 to 20");
  app.add_option("--prompt-logprobs", o.prompt_logprobs, "the same for prompt tokens");
  app.add_flag("--json", o.json, "print one JSON object instead of text");
}

absl::Status FillPrompt(const GenerateOptions& o, v1::GenerateRequest& request) {
  if (o.chat) {
    if (o.system) {
      v1::ChatMessage* system = request.mutable_chat()->add_messages();
      system->set_role("system");
      system->set_content(*o.system);
    }
    v1::ChatMessage* user = request.mutable_chat()->add_messages();
    user->set_role("user");
    user->set_content(*o.chat);
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
  return absl::OkStatus();
}

absl::StatusOr<v1::GenerateRequest> MakeRequest(const GenerateOptions& o) {
  v1::GenerateRequest request;
  TREADLE_RETURN_IF_ERROR(FillPrompt(o, request));
  v1::Sampling& sampling = *request.mutable_sampling();
  sampling.set_temperature(o.temperature);
  if (o.top_k) sampling.set_top_k(*o.top_k);
  if (o.top_p) sampling.set_top_p(*o.top_p);
  if (o.min_p) sampling.set_min_p(*o.min_p);
  if (o.repetition_penalty) sampling.set_repetition_penalty(*o.repetition_penalty);
  if (o.presence_penalty) sampling.set_presence_penalty(*o.presence_penalty);
  if (o.frequency_penalty) sampling.set_frequency_penalty(*o.frequency_penalty);
  if (o.seed) sampling.set_seed(*o.seed);
  sampling.set_num_candidates(o.candidates);
  v1::Stopping& stopping = *request.mutable_stopping();
  if (o.max_new_tokens) stopping.set_max_new_tokens(*o.max_new_tokens);
  if (o.min_new_tokens) stopping.set_min_new_tokens(*o.min_new_tokens);
  for (const std::string& text : o.stop) stopping.add_stop_strings(text);
  for (int32_t id : o.stop_token_ids) stopping.add_stop_token_ids(id);
  stopping.set_ignore_eos(o.ignore_eos);
  if (o.logprobs) request.mutable_response()->set_logprobs(*o.logprobs);
  if (o.prompt_logprobs) request.mutable_response()->set_prompt_logprobs(*o.prompt_logprobs);
  return request;
}

absl::Status Generate(const GenerateOptions& o) {
  std::chrono::milliseconds timeout{0};
  if (!o.timeout.empty()) {
    const auto parsed = ParseDuration(o.timeout);
    if (!parsed.ok()) return InvalidArgument("--timeout ", std::string(parsed.status().message()));
    timeout = *parsed;
  }
  TREADLE_ASSIGN_OR_RETURN(const v1::GenerateRequest request, MakeRequest(o));
  AnswerPrinter printer({.candidates = std::max(1, o.candidates),
                         .json = o.json,
                         .prompt_logprobs = o.prompt_logprobs.has_value()});
  const OnResponse print = [&](const v1::GenerateResponse& response) { printer.Add(response); };
  const std::string target = o.target.empty() ? kDefaultTarget : o.target;
  TREADLE_ASSIGN_OR_RETURN(const ClientAccess access, OpenAccess(o.access));
  TREADLE_RETURN_IF_ERROR(o.engine.model.empty()
                              ? GenerateFromServer(target, access, timeout, request, print)
                              : GenerateInProcess(o.engine, timeout, request, print));
  printer.Finish();
  return absl::OkStatus();
}

}  // namespace

int RunGenerate(int argc, char** argv) {
  GenerateOptions options;
  CLI::App app("Generates text from a prompt: --chat, --prompt, --token-ids, or stdin.");
  AddFlags(app, options);
  if (auto code = ParseFlags(app, "generate", argc, argv)) return *code;
  const absl::Status status = Generate(options);
  return status.ok() ? 0 : Fail("generate", status);
}

}  // namespace treadle
