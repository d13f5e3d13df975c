// treadle replay: runs again what `serve --record` wrote, in one process, and compares it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "base/mapped_file.h"
#include "base/number.h"
#include "base/status.h"
#include "engine/record/replay.h"
#include "engine/remote/received_checkpoint.h"
#include "models/checkpoints/checkpoint.h"
#include "server/cli/command.h"
#include "server/cli/progress.h"
#include "server/cli/rank_devices.h"
#include "server/configuration_sources.h"

namespace treadle {
namespace {

constexpr int kSame = 0, kDifferent = 1, kUnusable = 2;
// Another instruction set adds in another order; log probabilities of models as they are differ by
// less than this, wherever the token is the same.
constexpr float kOtherMachine = 0.05f;
constexpr std::chrono::minutes kPatience{30};  // for one iteration: the machine may be a small one

struct ReplayFlags {
  std::string file;
  std::string model;
  std::string until;
  std::string request;
  int64_t threads = 0;
};

// "[EPOCH:]N"; without an epoch, the last one.
absl::StatusOr<RecordedPlace> ParsePlace(const std::string& text, const RecordingSummary& summary) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  const std::optional<uint64_t> iteration = NumberIn<uint64_t>(parts.back());
  const std::optional<uint64_t> epoch =
      parts.size() == 2 ? NumberIn<uint64_t>(parts[0])
                        : std::optional(summary.last ? summary.last->epoch : 0);
  if (parts.size() <= 2 && iteration && epoch) return RecordedPlace{*epoch, *iteration};
  return InvalidArgument("--until-iteration is '", text, "', expected a number, or EPOCH:NUMBER");
}

// A recording with what it takes to run it here.
struct OpenedRecording {
  std::unique_ptr<MappedFile> file;
  RecordingSummary summary;
  ServeOptions options;
  std::unique_ptr<Checkpoint> checkpoint;
};

absl::StatusOr<OpenedRecording> OpenRecording(const ReplayFlags& flags) {
  OpenedRecording opened;
  TREADLE_ASSIGN_OR_RETURN(opened.file, MappedFile::Open(flags.file));
  TREADLE_ASSIGN_OR_RETURN(opened.summary, Summarize(opened.file->text()));
  const RecordedSetup& setup = opened.summary.setup;
  ServeOptions& options = opened.options;
  TREADLE_ASSIGN_OR_RETURN(options, OptionsFrom(setup.configuration));
  if (!flags.model.empty()) options.model = flags.model;
  // One process has all stages, on the kind of device that the server had.
  options.workers.clear();
  options.pipeline_parallel = 1;
  options.max_batch_tokens = setup.max_batch_tokens;
  options.threads = flags.threads;
  options.pin_threads = false;
  if (setup.backend.find("cuda") == setup.backend.npos) options.device = DeviceChoice::kCpu;
  TREADLE_ASSIGN_OR_RETURN(opened.checkpoint, Checkpoint::Open(options.model));
  TREADLE_ASSIGN_OR_RETURN(const std::string fingerprint, Fingerprint(*opened.checkpoint));
  if (fingerprint != setup.fingerprint) {
    return InvalidArgument("model ", options.model, " is another one than was recorded: its files' ",
                           "sum is ", fingerprint, ", expected ", setup.fingerprint);
  }
  if (setup.end_layers.back() != opened.checkpoint->config().layers) {
    return InvalidArgument("the recording's stages end at layer ", setup.end_layers.back(),
                           ", the model has ", opened.checkpoint->config().layers);
  }
  return opened;
}

void Introduce(const OpenedRecording& opened) {
  const RecordingSummary& summary = opened.summary;
  std::printf("recorded by treadle %s: %s\n", summary.setup.version.c_str(),
              summary.setup.backend.c_str());
  if (summary.setup.version != TREADLE_VERSION) {
    std::printf("this is treadle %s: defaults and last bits may differ\n", TREADLE_VERSION);
  }
  for (const std::string& end : summary.epoch_ends) std::printf("%s\n", end.c_str());
  std::printf("%s", Str(summary.iterations, " iterations with results").c_str());
  if (summary.unanswered > 0) std::printf("%s", Str(", ", summary.unanswered, " without").c_str());
  std::printf("; %s\n", summary.end.empty()
                            ? Str("it ends without a word, with ", summary.cut_off,
                                  " bytes of an entry that is not whole")
                                  .c_str()
                            : Str("it ends because ", summary.end).c_str());
}

// The stages that were recorded, with tensor-parallel ranks as there.
absl::StatusOr<std::unique_ptr<ReplayStages>> LoadStages(const OpenedRecording& opened,
                                                         std::string& description) {
  const RecordedSetup& setup = opened.summary.setup;
  const ServeOptions& options = opened.options;
  TREADLE_ASSIGN_OR_RETURN(const RankDevices devices, RankDevices::Choose(options));
  std::vector<std::vector<StageRanks::Rank>> stages;
  LoadOptions load = LoadOptionsFrom(options, setup.max_context);
  for (const int64_t end : setup.end_layers) {
    load.layers = {load.layers.end, end};
    TREADLE_ASSIGN_OR_RETURN(auto backends, devices.Create());
    std::vector<Backend*> pointers;
    for (const auto& backend : backends) pointers.push_back(backend.get());
    TREADLE_ASSIGN_OR_RETURN(auto models, LoadModelRanks(*opened.checkpoint, pointers, load));
    description = backends[0]->description();
    std::vector<StageRanks::Rank>& ranks = stages.emplace_back();
    for (size_t i = 0; i < models.size(); ++i) {
      ranks.push_back({std::move(backends[i]), std::move(models[i])});
    }
  }
  ReplayStages::Options stage;
  stage.ranks.max_batch_tokens = setup.max_batch_tokens;
  stage.ranks.kv.page_size = options.page_size;
  stage.ranks.kv.dtype = options.kv_dtype;
  // As many pages as plans name: a laptop has not a server's memory.
  for (const PageKind kind : kPageKinds) {
    stage.ranks.kv.num_pages[kind] = std::min(
        setup.kv_pages[kind], std::max<int64_t>(opened.summary.pages_used[kind], 1));
  }
  stage.ranks.timeout = kPatience;
  stage.ranks.join = devices.Joiner();
  stage.wire = options.wire;
  return ReplayStages::Create(std::move(stages), stage);
}

void Tell(const ReplayDifference& difference, const RecordedRequests& requests) {
  const auto request = requests.RequestOf(difference.at.epoch, difference.sequence);
  std::printf("%s\n", Str("DIFFERENT in iteration ", difference.at.iteration, " of epoch ",
                          difference.at.epoch, ", request ", request ? Str(*request) : "unknown",
                          ", sequence ", difference.sequence, " (candidate ", difference.candidate,
                          "), step ", difference.step, ", position ", difference.position, ": ",
                          difference.what)
                          .c_str());
}

absl::StatusOr<int> RunRecording(const ReplayFlags& flags) {
  TREADLE_ASSIGN_OR_RETURN(const OpenedRecording opened, OpenRecording(flags));
  ReplayOptions options;
  if (!flags.until.empty()) {
    TREADLE_ASSIGN_OR_RETURN(options.until, ParsePlace(flags.until, opened.summary));
  }
  Introduce(opened);
  std::string backend;
  TREADLE_ASSIGN_OR_RETURN(const auto stages, LoadStages(opened, backend));
  // A description begins with device and instruction set.
  const std::string machine = backend.substr(0, backend.find(',') + 1);
  if (opened.summary.setup.backend.find(machine) == std::string::npos) {
    options.tolerance = kOtherMachine;
    std::printf("this machine computes on %s: last bits may differ, so tokens are compared, and "
                "log probabilities to within %g\n",
                backend.c_str(), options.tolerance);
  }
  TREADLE_ASSIGN_OR_RETURN(const ReplayReport report,
                           Replay(opened.file->text(), opened.summary.setup.max_batch_tokens,
                                  *stages, options));
  std::printf("%s\n", Str("replayed ", report.iterations, " iterations: ", report.tokens,
                          " tokens and ", report.logprobs, " log probabilities compared")
                          .c_str());
  if (!report.difference) {
    std::printf("IDENTICAL\n");
    return kSame;
  }
  Tell(*report.difference, opened.summary.requests);
  return kDifferent;
}

absl::StatusOr<std::string> Dump(const ReplayFlags& flags) {
  TREADLE_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(flags.file));
  return DumpRequest(file->text(), flags.request);
}

}  // namespace

int RunReplay(int argc, char** argv) {
  ReplayFlags flags;
  CLI::App app("Runs the plans that `treadle serve --record` wrote again, in this process, and "
               "compares every token and log probability.");
  app.footer("Exit codes: 0 all was the same; 1 something differed, and where is said; 2 the "
             "recording or the model cannot be used.");
  app.add_option("file", flags.file, "the recording; an older part of it has .1 at its name's end")
      ->required();
  app.add_option("--model", flags.model, "the model that was served; without it: where it was then");
  app.add_option("--until-iteration", flags.until,
                 "the last iteration to run: a number in the last epoch, or EPOCH:NUMBER");
  app.add_option("--dump-request", flags.request,
                 "instead, print all that is known of the request with this number in the ledger, "
                 "or with this id of its client's");
  app.add_option("--threads", flags.threads, "compute threads; 0: one per CPU")
      ->check(CLI::NonNegativeNumber);
  if (auto code = ParseFlags(app, "replay", argc, argv)) return *code;
  if (!flags.request.empty()) return Finish("replay", Dump(flags));
  const absl::StatusOr<int> code = RunRecording(flags);
  if (code.ok()) return *code;
  Fail("replay", code.status());
  return kUnusable;
}

}  // namespace treadle
