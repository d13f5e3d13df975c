#include "tests/engine/record/recorded_run.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <utility>

#include "base/status.h"
#include "engine/local_engine.h"
#include "engine/record/record.pb.h"
#include "engine/record/record_file.h"
#include "kernels/cpu/cpu_backend.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/checkpoint.h"
#include "tests/engine/company/company.h"
#include "tests/engine/engine_runner.h"
#include "tests/engine/plan_builder.h"
#include "tests/support/assert_ok.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

constexpr int64_t kBatchTokens = 64, kPageSize = 16, kPages = 48;

std::vector<StageRanks::Rank> LoadRanksOf(const RecordedRun& run, LayerRange layers,
                                          const WrapBackend& wrap = {}, OpCheck* check = nullptr,
                                          int stage = 0) {
  auto checkpoint = Checkpoint::Open(run.model).value();
  std::vector<StageRanks::Rank> ranks;
  for (int rank = 0; rank < run.ranks; ++rank) {
    auto cpu = CreateCpuBackend({.threads = 1, .compute = run.compute}).value();
    std::unique_ptr<Backend> backend = wrap ? wrap(std::move(cpu)) : std::move(cpu);
    CheckedRank checked;
    if (check != nullptr) {
      checked = CheckOps(std::move(backend), run.compute, *check, stage, rank);
      backend = std::move(checked.backend);
    }
    LoadOptions load;
    load.layers = layers;
    load.shard = {rank, run.ranks};
    load.max_batch_tokens = kBatchTokens;
    load.threads = 1;
    auto model = Model::Load(*checkpoint, *backend, load).value();
    if (check != nullptr) {
      model->ObserveLayers([at = checked.check](int64_t layer) { at->AtLayer(layer); });
    }
    ranks.push_back({std::move(backend), std::move(model)});
  }
  return ranks;
}

}  // namespace

RecordingOptions RecordedRun::Options() {
  RecordingOptions options;
  options.file = file;
  options.max_bytes = max_bytes;
  options.queue_bytes = queue_bytes;
  options.setup = {.version = "1",
                   .fingerprint = "f",
                   .backend = "cpu",
                   .configuration = "",
                   .end_layers = end_layers,
                   .max_batch_tokens = kBatchTokens,
                   .max_context = 256,
                   .kv_pages = pages};
  options.ended = [this](const std::string& why) { ended.push_back(why); };
  return options;
}

RecordedRun NewRun(const std::string& name, const char* architecture, const char* format) {
  const std::string folder = testing::TempDir() + Str("record-", getpid(), "-", name);
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  TinyModelOptions options;
  options.layers = 4;
  options.format = format;
  auto written = WriteTinyGguf(*FindArchitecture(architecture), folder, options).value();
  const auto checkpoint = Checkpoint::Open(written).value();
  const auto paging = KvPaging::Of(checkpoint->config(), kPageSize, kBatchTokens);
  return {.model = written,
          .file = folder + "/recording",
          .paging = paging,
          .pages = {paging.whole ? kPages : 0, paging.ring > 0 ? kPages : 0}};
}

void RecordRequests(RecordedRun& run, std::unique_ptr<Engine> engine, int epochs) {
  const bool one_plan_each = engine->stages() > 1;
  ASSERT_OK_AND_ASSIGN(auto recording, Recording::Open(run.Options()));
  EngineRunner runner(Recording::Wrap(recording, std::move(engine)));
  recording.reset();
  for (int epoch = 0; epoch < epochs; ++epoch) {
    if (epoch > 0) runner.engine().Restart();
    runner.WaitForRoom();
    auto requests = RandomRequests(run.seed, run.requests, TinyVocabulary(), 40, 12);
    for (auto& driven : requests) {
      std::vector<int32_t>& prompt = driven.request.prompt;
      prompt.insert(prompt.begin(), static_cast<size_t>(run.shared_prompt), 7);
    }
    PlanDriver driver({.paging = run.paging,
                       .num_pages = run.pages,
                       .max_batch_tokens = kBatchTokens,
                       .seed = run.seed + static_cast<uint32_t>(epoch),
                       .one_plan_each = one_plan_each},
                      std::move(requests));
    if (epoch + 1 == epochs) {
      runner.RunAll(driver);
      continue;
    }
    for (uint64_t iteration = 0; iteration < 12; ++iteration) {
      runner.engine().Submit(driver.Next(runner.engine().epoch(), iteration));
      if (iteration < 11) driver.Absorb(runner.Next());
    }
  }
}

void RecordLocal(RecordedRun& run, int epochs) {
  LocalEngineOptions options{.max_batch_tokens = kBatchTokens,
                             .page_size = kPageSize,
                             .kv_pages = run.pages,
                             .kv_dtype = DType::kF32};
  ASSERT_OK_AND_ASSIGN(auto engine, LocalEngine::Create(LoadRanksOf(run, {0, 4}), options));
  RecordRequests(run, std::move(engine), epochs);
}

std::unique_ptr<ReplayStages> StagesFor(const RecordedRun& run, const RecordingSummary& summary,
                                        WireType wire, const WrapBackend& wrap, OpCheck* check) {
  std::vector<std::vector<StageRanks::Rank>> stages;
  int64_t begin = 0;
  for (const int64_t end : summary.setup.end_layers) {
    stages.push_back(LoadRanksOf(run, {begin, end}, wrap, check, static_cast<int>(stages.size())));
    begin = end;
  }
  ReplayStages::Options options;
  options.ranks.max_batch_tokens = kBatchTokens;
  options.ranks.kv = {
      .page_size = kPageSize, .num_pages = summary.pages_used, .dtype = DType::kF32};
  options.wire = wire;
  return ReplayStages::Create(std::move(stages), options).value();
}

absl::StatusOr<ReplayReport> ReplayAll(const RecordedRun& run, const std::string& recording,
                                       WireType wire, const ReplayOptions& options) {
  TREADLE_ASSIGN_OR_RETURN(const RecordingSummary summary, Summarize(recording));
  const auto stages = StagesFor(run, summary, wire);
  return Replay(recording, kBatchTokens, *stages, options);
}

std::string Changed(const std::string& recording,
                    const std::function<bool(record::Entry& entry)>& change) {
  const std::string path = testing::TempDir() + Str("changed-", getpid());
  {
    auto writer = RecordFileWriter::Create(path).value();
    auto reader = RecordReader::Open(recording).value();
    record::Entry entry;
    while (*reader.Next(entry)) {
      if (change(entry)) TREADLE_CHECK(writer.Append(entry.SerializeAsString()).ok());
    }
  }
  return ReadWhole(path);
}

}  // namespace treadle
