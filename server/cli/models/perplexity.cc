// treadle perplexity: how well a model predicts a text, by a named protocol.
#include "bench/quality/perplexity.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <memory>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "base/status.h"
#include "bench/quality/teacher_forcing.h"
#include "models/checkpoints/checkpoint.h"
#include "server/cli/command.h"
#include "server/cli/models/teacher_forcing_flags.h"
#include "server/cli/progress.h"

namespace treadle {
namespace {

struct PerplexityFlags {
  std::string model;
  TeacherForcingFlags forcing;
  std::string weights;
  PerplexityProtocol protocol = PerplexityProtocol::kWindow;
  int64_t context = 0;
  int64_t max_tokens = 0;
  std::string log_probabilities;
  bool json = false;
};

void WriteLine(const ScoredToken& token, bool csv, std::ostream& out) {
  if (csv) {
    out << token.window << ',' << token.position << ',' << token.token << ','
        << token.log_probability << '\n';
  } else {
    out << R"({"window":)" << token.window << R"(,"position":)" << token.position << R"(,"token":)"
        << token.token << R"(,"logprob":)" << token.log_probability << "}\n";
  }
}

absl::StatusOr<std::string> Measure(const PerplexityFlags& flags) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(flags.model));
  TREADLE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                           EncodeTextFile(*checkpoint, flags.forcing.text));
  TREADLE_ASSIGN_OR_RETURN(
      const PerplexityPlan plan,
      PlanPerplexity(flags.protocol, flags.context, checkpoint->config().context,
                     static_cast<int64_t>(tokens.size()), flags.max_tokens));
  TREADLE_ASSIGN_OR_RETURN(const WeightPlan weights, ParseWeights(flags.weights, *checkpoint));
  const std::string notice = weights.Notice(*checkpoint);
  if (!notice.empty()) std::fprintf(stderr, "--weights: %s\n", notice.c_str());
  // A line per scored token. The file appears under its name once it is whole.
  PerplexityCallbacks callbacks;
  const std::string& path = flags.log_probabilities;
  const std::string partial = path + ".partial";
  std::ofstream lines;
  std::error_code error;
  const absl::Cleanup remove = [&] {
    if (!path.empty()) std::filesystem::remove(partial, error);
  };
  if (!path.empty()) {
    const bool csv = path.ends_with(".csv");
    lines.open(partial);
    if (!lines) return InvalidArgument("--logprobs: cannot write ", path);
    lines << std::setprecision(9) << (csv ? "window,position,token,logprob\n" : "");
    callbacks.scored = [&lines, csv](const ScoredToken& token) { WriteLine(token, csv, lines); };
  }
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<TeacherForcedModel> model,
                           LoadTeacherForced(*checkpoint, flags.forcing, weights, plan.context));
  std::fprintf(stderr, "%s; %s\n", checkpoint->model_name().c_str(),
               model->backend().description().c_str());

  const TokenizerSpec& tokenizer = *checkpoint->tokenizer();
  callbacks.progress = ShowProgress("scoring");
  const PerplexityReport report =
      MeasurePerplexity(*model, tokens, plan, tokenizer.add_bos ? tokenizer.bos : -1, callbacks);
  if (!path.empty()) {
    lines.close();
    if (lines) std::filesystem::rename(partial, path, error);
    if (!lines || error) return InvalidArgument("--logprobs: cannot write ", path);
  }
  if (!flags.json) return ToTable(report);
  nlohmann::ordered_json json = {{"model", checkpoint->model_name()},
                                 {"weights", weights.text()},
                                 {"backend", model->backend().description()},
                                 {"kv_dtype", Name(flags.forcing.model.kv_dtype)},
                                 {"text", flags.forcing.text}};
  json.update(ToJson(report));
  return json.dump();
}

}  // namespace

int RunPerplexity(int argc, char** argv) {
  PerplexityFlags flags;
  CLI::App app("How well a model predicts a text: perplexity by a named protocol.");
  app.add_option("model", flags.model, ".gguf file or Hugging Face folder")->required();
  AddTextFlags(app, flags.forcing);
  AddVariantFlags(app, flags.forcing);
  app.add_option("--weights", flags.weights,
                 "convert matrices while loading, as for treadle serve; empty: as stored");
  AddChoice(app, "--protocol", flags.protocol, kPerplexityProtocols,
            "window: consecutive windows, all tokens scored (GPTQ, SpQR); llama.cpp: the second "
            "half of each chunk scored");
  app.add_option("--context", flags.context,
                 "tokens per window; 0: 2048, or 512 for llama.cpp, or what the model allows")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--max-tokens", flags.max_tokens, "most tokens of the text; 0: all")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--logprobs", flags.log_probabilities,
                 "file for the log probability of each scored token: JSON lines, or .csv");
  app.add_flag("--json", flags.json, "print one JSON object");
  if (auto code = ParseFlags(app, "perplexity", argc, argv)) return *code;
  return Finish("perplexity", Measure(flags));
}

}  // namespace treadle
