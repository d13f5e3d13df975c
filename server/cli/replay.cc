// treadle replay: runs again what `serve --record` wrote, in one process, and compares it.
#include "engine/record/replay.h"

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
#include "base/version.h"
#include "engine/record/op_check.h"
#include "models/adapters/adapter_file.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/fingerprint.h"
#include "models/text/tokenizer.h"
#include "server/cli/command.h"
#include "server/cli/progress.h"
#include "server/cli/rank_devices.h"
#include "server/configuration_sources.h"

namespace treadle {
namespace {

constexpr int kSame = 0, kDifferent = 1, kUnusable = 2, kUnfinished = 3;
// Another instruction set adds in another order; log probabilities of models as they are differ by
// less than this, wherever the token is the same.
constexpr float kOtherMachine = 0.05f;
constexpr std::chrono::minutes kPatience{30};  // for one iteration: the machine may be a small one

struct ReplayFlags {
  std::string file;
  std::string model;
  std::string until;
  std::string request;
  bool texts = false;
  bool reference = false;
  int64_t threads = 0;
};

// "[EPOCH:]N"; without an epoch, the last one. NotFound names the iterations there are.
absl::StatusOr<RecordedPlace> ParsePlace(const std::string& text, const RecordingSummary& summary) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  const std::optional<uint64_t> iteration = NumberIn<uint64_t>(parts.back());
  const std::optional<uint64_t> epoch = parts.size() == 2
                                            ? NumberIn<uint64_t>(parts[0])
                                            : std::optional(summary.last ? summary.last->epoch : 0);
  if (parts.size() > 2 || !iteration || !epoch) {
    return InvalidArgument("--until-iteration is '", text, "', expected a number, or EPOCH:NUMBER");
  }
  const RecordedPlace place{*epoch, *iteration};
  if (const absl::Status there = summary.CheckPlace(place); !there.ok()) {
    return NotFound("--until-iteration is '", text, "': ", there.message());
  }
  return place;
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
    return InvalidArgument("model ", options.model,
                           " is another one than was recorded: its files' ", "sum is ", fingerprint,
                           ", expected ", setup.fingerprint);
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
  if (summary.setup.version != kVersion) {
    std::printf("this is treadle %s: defaults and last bits may differ\n", kVersion);
  }
  for (const std::string& end : summary.epoch_ends) std::printf("%s\n", end.c_str());
  std::printf("%s", Str(summary.iterations, " iterations with results").c_str());
  if (summary.unanswered > 0) std::printf("%s", Str(", ", summary.unanswered, " without").c_str());
  std::printf("; %s\n", summary.end.empty() ? Str("it ends without a word, with ", summary.cut_off,
                                                  " bytes of an entry that is not whole")
                                                  .c_str()
                                            : Str("it ends because ", summary.end).c_str());
}

// The stages that were recorded, with tensor-parallel ranks as there. `check`: their ops are looked
// at; or null.
absl::StatusOr<std::unique_ptr<ReplayStages>> LoadStages(const OpenedRecording& opened,
                                                         OpCheck* check, std::string& description) {
  const RecordedSetup& setup = opened.summary.setup;
  const ServeOptions& options = opened.options;
  TREADLE_ASSIGN_OR_RETURN(const RankDevices devices, RankDevices::Choose(options));
  if (check != nullptr && devices.cuda()) {
    return Unimplemented("ops are checked on the CPU only, and the recording is of a GPU");
  }
  std::vector<std::vector<StageRanks::Rank>> stages;
  LoadOptions load = LoadOptionsFrom(options, setup.max_context);
  for (const int64_t end : setup.end_layers) {
    load.layers = {load.layers.end, end};
    TREADLE_ASSIGN_OR_RETURN(auto backends, devices.Create());
    std::vector<Backend*> pointers;
    std::vector<CheckedBackend*> checked;
    for (size_t i = 0; i < backends.size(); ++i) {
      if (check != nullptr) {
        CheckedRank rank = CheckOps(std::move(backends[i]), options.compute, *check,
                                    static_cast<int>(stages.size()), static_cast<int>(i));
        backends[i] = std::move(rank.backend);
        checked.push_back(rank.check);
      }
      pointers.push_back(backends[i].get());
    }
    TREADLE_ASSIGN_OR_RETURN(auto models, LoadModelRanks(*opened.checkpoint, pointers, load));
    description = backends[0]->description();
    std::vector<StageRanks::Rank>& ranks = stages.emplace_back();
    for (size_t i = 0; i < models.size(); ++i) {
      if (check != nullptr) {
        models[i]->ObserveLayers([rank = checked[i]](int64_t layer) { rank->AtLayer(layer); });
      }
      ranks.push_back({std::move(backends[i]), std::move(models[i])});
    }
  }
  ReplayStages::Options stage;
  stage.ranks.max_batch_tokens = setup.max_batch_tokens;
  stage.ranks.kv.page_size = options.page_size;
  stage.ranks.kv.dtype = options.kv_dtype;
  // As many pages as plans name: a laptop has not a server's memory.
  for (const PageKind kind : kPageKinds) {
    stage.ranks.kv.num_pages[kind] =
        std::min(setup.kv_pages[kind], std::max<int64_t>(opened.summary.pages_used[kind], 1));
  }
  stage.ranks.timeout = kPatience;
  stage.ranks.join = devices.Joiner();
  stage.wire = options.wire;
  TREADLE_ASSIGN_OR_RETURN(auto created, ReplayStages::Create(std::move(stages), stage));
  for (const auto& [id, recorded] : opened.summary.adapters) {
    TREADLE_ASSIGN_OR_RETURN(const auto adapter,
                             AdapterFile::Open(recorded.path, opened.checkpoint->config()));
    if (adapter->hash() != recorded.hash) {
      return InvalidArgument(recorded.path, ": the adapter has the contents ", adapter->hash(),
                             ", the recording had ", recorded.hash);
    }
    TREADLE_RETURN_IF_ERROR(created->LoadAdapter(*adapter));
  }
  return created;
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

// The op that differed. The row is of the batch, where the op has a row for each token of the plan.
void Tell(const OpFinding& op, const IterationPlan& plan, int64_t layers) {
  std::string row = Str("row ", op.row);
  int64_t begin = 0;
  for (const Step& step : plan.steps) {
    if (op.layer < layers && op.row >= begin && op.row < begin + step.num_tokens) {
      row += Str(" (sequence ", step.sequence, ", position ", step.first_position + op.row - begin,
                 ")");
    }
    begin += step.num_tokens;
  }
  const std::string layer = op.layer < 0         ? "the embedding"
                            : op.layer == layers ? "the head"
                                                 : Str("layer ", op.layer);
  std::printf("%s\n", Str("FIRST WRONG OP in iteration ", plan.iteration, " of epoch ", plan.epoch,
                          ": stage ", op.stage, ", rank ", op.rank, ", ", layer, ", ", op.name,
                          ", ", row, ": ", op.what)
                          .c_str());
}

// Runs the recording with ops checked on the reference, those of one sequence's iterations or all,
// up to the first that is wrong. Gives whether one was.
absl::StatusOr<bool> FindWrongOp(const OpenedRecording& opened, ReplayOptions options,
                                 std::optional<SequenceId> sequence, ReplayReport& report) {
  OpCheck check;
  std::string backend;
  TREADLE_ASSIGN_OR_RETURN(const auto stages, LoadStages(opened, &check, backend));
  IterationPlan running;
  options.before = [&](const IterationPlan& plan) {
    running = plan;
    check.Arm(!sequence || std::ranges::count(plan.steps, *sequence, &Step::sequence) > 0);
  };
  options.after = [&] { return !check.found(); };
  TREADLE_ASSIGN_OR_RETURN(
      report, Replay(opened.file->text(), opened.summary.setup.max_batch_tokens, *stages, options));
  const std::optional<OpFinding> found = check.found();
  if (found) Tell(*found, running, opened.checkpoint->config().layers);
  return found.has_value();
}

// Where what differs comes from.
absl::Status Locate(const OpenedRecording& opened, ReplayOptions options,
                    const ReplayDifference& difference) {
  std::printf(
      "looking for the op: each of sequence %s's is computed by the reference backend, too\n",
      Str(difference.sequence).c_str());
  std::fflush(stdout);
  options.first_epoch = difference.at.epoch;
  options.until = difference.at;
  ReplayReport report;
  TREADLE_ASSIGN_OR_RETURN(const bool found,
                           FindWrongOp(opened, options, difference.sequence, report));
  if (found) return absl::OkStatus();
  std::printf("no op is wrong here: %s\n",
              report.difference ? "the machine that was recorded computed something else, or lost "
                                  "what it had computed"
                                : "this time it came out as recorded, so this machine does not "
                                  "compute the same twice");
  return absl::OkStatus();
}

absl::StatusOr<int> RunRecording(const ReplayFlags& flags) {
  TREADLE_ASSIGN_OR_RETURN(const OpenedRecording opened, OpenRecording(flags));
  ReplayOptions options;
  if (!flags.until.empty()) {
    TREADLE_ASSIGN_OR_RETURN(options.until, ParsePlace(flags.until, opened.summary));
  }
  Introduce(opened);
  std::string backend;
  TREADLE_ASSIGN_OR_RETURN(auto stages, LoadStages(opened, nullptr, backend));
  // A description begins with device and instruction set.
  const std::string machine = backend.substr(0, backend.find(',') + 1);
  if (opened.summary.setup.backend.find(machine) == std::string::npos) {
    options.tolerance = kOtherMachine;
    std::printf(
        "this machine computes on %s: last bits may differ, so tokens are compared, and "
        "log probabilities to within %g\n",
        backend.c_str(), options.tolerance);
  }
  ReplayReport report;
  bool wrong = false;
  if (flags.reference) {
    stages.reset();
    TREADLE_ASSIGN_OR_RETURN(wrong, FindWrongOp(opened, options, std::nullopt, report));
  } else {
    TREADLE_ASSIGN_OR_RETURN(
        report,
        Replay(opened.file->text(), opened.summary.setup.max_batch_tokens, *stages, options));
    stages.reset();
  }
  std::printf("%s\n", Str("replayed ", report.iterations, " iterations: ", report.tokens,
                          " tokens and ", report.logprobs, " log probabilities compared")
                          .c_str());
  if (report.difference) {
    Tell(*report.difference, opened.summary.requests);
    if (!flags.reference) {
      if (const absl::Status located = Locate(opened, options, *report.difference); !located.ok()) {
        std::printf("%s\n", std::string(located.message()).c_str());
      }
    }
    return kDifferent;
  }
  if (wrong) return kDifferent;
  std::printf("IDENTICAL%s\n",
              flags.reference ? ", and every op as the reference backend has it" : "");
  if (!opened.summary.end.empty() || options.until) return kSame;
  std::printf(
      "the recording has no end, as after a kill or while the server runs: it goes as far as %s\n",
      opened.summary.last ? Str("iteration ", opened.summary.last->iteration, " of epoch ",
                                opened.summary.last->epoch)
                                .c_str()
                          : "its beginning");
  return kUnfinished;
}

absl::StatusOr<std::string> Dump(const ReplayFlags& flags) {
  if (!flags.texts) {
    TREADLE_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(flags.file));
    return DumpRequest(file->text(), flags.request);
  }
  TREADLE_ASSIGN_OR_RETURN(const OpenedRecording opened, OpenRecording(flags));
  if (!opened.checkpoint->tokenizer()) {
    return InvalidArgument("--texts: the model ", opened.options.model, " has no tokenizer");
  }
  TREADLE_ASSIGN_OR_RETURN(const auto tokenizer,
                           Tokenizer::Create(*opened.checkpoint->tokenizer()));
  return DumpRequest(opened.file->text(), flags.request,
                     [&](int32_t token) { return tokenizer->TokenBytes(token, /*special=*/true); });
}

}  // namespace

int RunReplay(int argc, char** argv) {
  ReplayFlags flags;
  CLI::App app(
      "Runs the plans that `treadle serve --record` wrote again, in this process, and "
      "compares every token and log probability.");
  app.footer(
      "Exit codes: 0 all was the same; 1 something differed, and where is said; 2 the "
      "recording or the model cannot be used; 3 all was the same as far as the recording goes, "
      "which has no end, as after a kill or while the server runs.");
  app.add_option("file", flags.file, "recording; the name of an older part of it ends in .1")
      ->required();
  app.add_option("--model", flags.model,
                 "model that was served; without it: the path that was recorded");
  app.add_option("--until-iteration", flags.until,
                 "last iteration to run: a number in the last epoch, or EPOCH:NUMBER");
  app.add_option("--dump-request", flags.request,
                 "print all that is known of one request instead: "
                 "by its number in the ledger, or by its client's id");
  app.add_flag("--texts", flags.texts, "show each token with its text, with --dump-request");
  app.add_flag("--reference", flags.reference,
               "compute every op on the reference backend, too, from the same inputs, and stop at "
               "the first that differs by more than its formats allow; slow, and on CPUs only "
               "(where the replay differs, this is done for the sequence that does)");
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
