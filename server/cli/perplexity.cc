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

#include "base/status.h"
#include "bench/quality/teacher_forcing.h"
#include "models/checkpoints/checkpoint.h"
#include "server/cli/command.h"
#include "server/cli/progress.h"
#include "server/cli/teacher_forcing_flags.h"

namespace treadle {
namespace {

constexpr Choice<PerplexityProtocol> kProtocols[] = {{"window", PerplexityProtocol::kWindow},
                                                     {"llama.cpp", PerplexityProtocol::kLlamaCpp}};

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

// A line per scored token: JSON, or comma-separated values if the file's name ends in .csv. The
// file appears under its name once it is whole.
class LogProbabilityFile {
 public:
  static absl::StatusOr<std::unique_ptr<LogProbabilityFile>> Create(const std::string& path) {
    std::unique_ptr<LogProbabilityFile> file(new LogProbabilityFile(path));
    if (!file->stream_) return InvalidArgument("--logprobs: cannot write ", path);
    file->stream_ << std::setprecision(9);
    if (file->csv_) file->stream_ << "window,position,token,logprob\n";
    return file;
  }
  ~LogProbabilityFile() {
    std::error_code ignored;
    if (!finished_) std::filesystem::remove(partial_, ignored);
  }

  void Add(const ScoredToken& token) {
    if (csv_) {
      stream_ << token.window << ',' << token.position << ',' << token.token << ','
              << token.log_probability << '\n';
    } else {
      stream_ << R"({"window":)" << token.window << R"(,"position":)" << token.position
              << R"(,"token":)" << token.token << R"(,"logprob":)" << token.log_probability
              << "}\n";
    }
  }

  absl::Status Finish() {
    stream_.close();
    std::error_code error;
    if (stream_) std::filesystem::rename(partial_, path_, error);
    if (!stream_ || error) return InvalidArgument("--logprobs: cannot write ", path_);
    finished_ = true;
    return absl::OkStatus();
  }

 private:
  explicit LogProbabilityFile(const std::string& path)
      : path_(path), partial_(path + ".partial"), csv_(path.ends_with(".csv")), stream_(partial_) {}

  const std::string path_, partial_;
  const bool csv_;
  std::ofstream stream_;
  bool finished_ = false;
};

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
  std::unique_ptr<LogProbabilityFile> log_probabilities;
  if (!flags.log_probabilities.empty()) {
    TREADLE_ASSIGN_OR_RETURN(log_probabilities,
                             LogProbabilityFile::Create(flags.log_probabilities));
  }
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<TeacherForcedModel> model,
                           LoadTeacherForced(*checkpoint, flags.forcing, weights, plan.context));
  std::fprintf(stderr, "%s; %s\n", checkpoint->model_name().c_str(),
               model->backend().description().c_str());

  PerplexityCallbacks callbacks;
  if (log_probabilities) {
    callbacks.scored = [&](const ScoredToken& token) { log_probabilities->Add(token); };
  }
  const TokenizerSpec& tokenizer = *checkpoint->tokenizer();
  PerplexityReport report;
  {
    Progress progress("scoring");
    callbacks.progress = [&](double fraction) { progress.Set(fraction); };
    report =
        MeasurePerplexity(*model, tokens, plan, tokenizer.add_bos ? tokenizer.bos : -1, callbacks);
  }
  if (log_probabilities) TREADLE_RETURN_IF_ERROR(log_probabilities->Finish());
  if (!flags.json) return ToTable(report);
  nlohmann::ordered_json json = {{"model", checkpoint->model_name()},
                                 {"weights", weights.text()},
                                 {"backend", model->backend().description()},
                                 {"kv_dtype", Name(flags.forcing.kv_dtype)},
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
  AddChoice(app, "--protocol", flags.protocol, kProtocols,
            "window: consecutive windows, all tokens scored (GPTQ, SpQR); llama.cpp: the second "
            "half of each chunk scored");
  app.add_option("--context", flags.context,
                 "tokens per window; 0: 2048, or 512 for llama.cpp, or what the model allows")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--max-tokens", flags.max_tokens, "of the text; 0: all")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--logprobs", flags.log_probabilities,
                 "file for the log probability of each scored token: JSON lines, or .csv");
  app.add_flag("--json", flags.json, "print one JSON object");
  if (auto code = ParseFlags(app, "perplexity", argc, argv)) return *code;
  return Finish("perplexity", Measure(flags));
}

}  // namespace treadle
