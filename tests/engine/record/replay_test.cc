// Recordings replay: in one process, bit for bit, whatever recorded them; and what was changed,
// cut off or lost is found and told.
#include "engine/record/replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <bit>
#include <filesystem>
#include <map>
#include <set>

#include "base/status.h"
#include "engine/plan/plan_messages.h"
#include "engine/record/record.pb.h"
#include "engine/record/record_writer.h"
#include "models/checkpoints/checkpoint.h"
#include "tests/engine/engine_runner.h"
#include "tests/engine/plan_builder.h"
#include "tests/engine/record/recorded_run.h"
#include "tests/support/assert_ok.h"
#include "tests/support/ranks/remote_cluster.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The result of one step, which samples.
IterationResult ResultOf(uint64_t epoch, uint64_t iteration, SequenceId sequence, int32_t token) {
  IterationResult result;
  result.epoch = epoch;
  result.iteration = iteration;
  result.steps.resize(1);
  result.steps[0].sequence = sequence;
  result.steps[0].outputs = {{.token = token}};
  return result;
}

// `least`: more iterations, tokens and log probabilities than so many were compared.
void ExpectIdentical(const absl::StatusOr<ReplayReport>& report, int64_t least = 5) {
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_FALSE(report->difference) << report->difference->what;
  EXPECT_GT(report->iterations, least);
  EXPECT_GT(report->tokens, least);
  EXPECT_GT(report->logprobs, least);
}

TEST(Replay, RequestsOfAllKindsAreIdentical) {
  for (const int ranks : {1, 2}) {
    RecordedRun run = NewRun("kinds");
    run.ranks = ranks;
    RecordLocal(run);
    ExpectIdentical(ReplayAll(run, ReadWhole(run.file)));
    EXPECT_TRUE(run.ended.empty());
    struct stat about {};
    ASSERT_EQ(stat(run.file.c_str(), &about), 0);
    EXPECT_EQ(about.st_mode & 0777, 0600u);
  }
}

// Two stages of two ranks, worker processes as it were, a wire that rounds, and an engine that is
// restarted with plans under way.
TEST(Replay, APipelineOfWorkersIsIdenticalInOneProcess) {
  for (const WireType wire : {WireType::kF32, WireType::kInt8}) {
    RecordedRun run = NewRun("pipeline");
    run.ranks = 2;
    run.end_layers = {2, 4};
    ClusterOptions cluster;
    cluster.model = run.model;
    cluster.stages = 2;
    cluster.engine.tensor_parallel = 2;
    cluster.engine.wire = wire;
    ASSERT_OK_AND_ASSIGN(auto started, StartThreadCluster(cluster));
    RecordRequests(run, std::move(started.engine), /*epochs=*/3);
    const std::string recording = ReadWhole(run.file);
    ASSERT_OK_AND_ASSIGN(const auto summary, Summarize(recording));
    EXPECT_EQ(summary.epoch_ends.size(), 2u);
    EXPECT_GE(summary.unanswered, 2);
    EXPECT_EQ(summary.last->epoch, 3u);
    ASSERT_EQ(summary.epochs.size(), 3u);
    int64_t iterations = 0;
    for (const auto& [epoch, range] : summary.epochs) {
      EXPECT_EQ(range.first, 0u) << epoch;
      iterations += static_cast<int64_t>(range.last) + 1;
    }
    EXPECT_EQ(iterations, summary.iterations);
    ExpectIdentical(ReplayAll(run, recording, wire));
    if (wire == WireType::kF32) continue;
    ASSERT_OK_AND_ASSIGN(const auto unrounded, ReplayAll(run, recording, WireType::kF32));
    EXPECT_TRUE(unrounded.difference);
  }
}

TEST(Replay, MasksAreRunAgain) {
  RecordedRun run = NewRun("masks");
  run.requests = 0;
  RecordLocal(run);  // nothing, but a header
  ASSERT_OK_AND_ASSIGN(auto recording, Recording::Open(run.Options()));
  ASSERT_OK_AND_ASSIGN(const auto summary, Summarize(ReadWhole(run.file)));
  RecordingSummary with_pages = summary;
  with_pages.pages_used = 4;
  const auto stages = StagesFor(run, with_pages);
  ASSERT_TRUE(stages->BeginEpoch().ok());
  const size_t words = MaskWords((*Checkpoint::Open(run.model))->config().vocab);
  for (int32_t i = 0; i < 6; ++i) {
    const Step step = MaskedOf(i == 0 ? StepOf(1, 0, {1, 2, 3}) : StepOf(1, 2 + i, {40 + i}));
    IterationPlan plan = PlanOf(1, i).Step(step);
    if (i == 0) plan.starts.push_back(StartOf(1, 3, {0}));
    OutputMask mask{.step = 0, .output = 0, .allowed = std::vector<uint32_t>(words)};
    mask.allowed[1] = uint32_t{1} << (8 + i + 1);  // token 40 + i + 1 alone
    recording->Masks(1, i, {mask});
    recording->Plan(plan);
    ASSERT_OK_AND_ASSIGN(const auto result, stages->Run(plan, {mask}));
    EXPECT_EQ(result.steps[0].token(), 40 + i + 1);
    recording->Result(result);
  }
  recording.reset();
  ASSERT_OK_AND_ASSIGN(const auto report, ReplayAll(run, ReadWhole(run.file)));
  EXPECT_FALSE(report.difference);
  EXPECT_EQ(report.tokens, 6);
}

TEST(Replay, AChangedTokenIsFoundWhereItIs) {
  RecordedRun run = NewRun("token");
  RecordLocal(run);
  const std::string recording = ReadWhole(run.file);
  for (const uint64_t iteration : {3, 10}) {
    int32_t was = -1;
    size_t step = 0;
    uint64_t changed_in = 0;
    const std::string changed = Changed(recording, [&](record::Entry& entry) {
      if (!entry.has_result() || was >= 0 || entry.result().iteration() < iteration) return true;
      for (int i = 0; i < entry.result().steps_size() && was < 0; ++i) {
        for (auto& output : *entry.mutable_result()->mutable_steps(i)->mutable_outputs()) {
          if (!output.has_token() || was >= 0) continue;
          was = output.token();
          step = static_cast<size_t>(i);
          changed_in = entry.result().iteration();
          output.set_token(was ^ 1);
        }
      }
      return true;
    });
    ASSERT_OK_AND_ASSIGN(const auto report, ReplayAll(run, changed));
    ASSERT_TRUE(report.difference);
    EXPECT_EQ(report.difference->at.epoch, 1u);
    EXPECT_EQ(report.difference->at.iteration, changed_in);
    EXPECT_EQ(report.difference->step, step);
    EXPECT_EQ(report.difference->what, Str("token is ", was, ", recorded ", was ^ 1));
    ReplayOptions before;
    before.until = RecordedPlace{1, changed_in - 1};
    ASSERT_OK_AND_ASSIGN(const auto until, ReplayAll(run, changed, WireType::kF32, before));
    EXPECT_FALSE(until.difference);
    EXPECT_EQ(until.iterations, static_cast<int64_t>(changed_in));
  }
}

TEST(Replay, AChangedBitOfALogProbabilityIsFound) {
  RecordedRun run = NewRun("bit");
  RecordLocal(run);
  bool done = false;
  const std::string changed = Changed(ReadWhole(run.file), [&](record::Entry& entry) {
    if (!entry.has_result()) return true;
    for (auto& step : *entry.mutable_result()->mutable_steps()) {
      for (auto& output : *step.mutable_outputs()) {
        if (done || !output.has_detail() || output.detail().logprob() == 0) continue;
        const auto bits = std::bit_cast<uint32_t>(output.detail().logprob());
        output.mutable_detail()->set_logprob(std::bit_cast<float>(bits ^ 1));
        done = true;
      }
    }
    return true;
  });
  ASSERT_TRUE(done);
  ASSERT_OK_AND_ASSIGN(const auto report, ReplayAll(run, changed));
  ASSERT_TRUE(report.difference);
  EXPECT_THAT(report.difference->what, HasSubstr("log probability of"));
  ReplayOptions other_machine;
  other_machine.tolerance = 1e-3f;
  ASSERT_OK_AND_ASSIGN(const auto tolerant, ReplayAll(run, changed, WireType::kF32, other_machine));
  EXPECT_FALSE(tolerant.difference);
}

TEST(Replay, AnyBeginningOfAFileIsCleanAndAnyChangedByteIsFound) {
  RecordedRun run = NewRun("cut");
  run.requests = 2;
  RecordLocal(run);
  std::string recording = ReadWhole(run.file);
  ASSERT_OK_AND_ASSIGN(const auto whole, Summarize(recording));
  EXPECT_EQ(whole.end, "the server ended");
  int64_t iterations = 0;
  for (size_t bytes = 0; bytes < recording.size(); ++bytes) {
    const auto summary = Summarize(std::string_view(recording).substr(0, bytes));
    if (!summary.ok()) {  // before the header is whole
      EXPECT_EQ(iterations, 0);
      EXPECT_TRUE(absl::IsInvalidArgument(summary.status())) << summary.status();
      continue;
    }
    EXPECT_GE(summary->iterations, iterations);
    EXPECT_EQ(summary->end, "");
    iterations = summary->iterations;
  }
  EXPECT_EQ(iterations, whole.iterations);
  ExpectIdentical(ReplayAll(run, recording.substr(0, recording.size() - 1)));
  for (size_t i = 0; i < recording.size(); ++i) {
    recording[i] = static_cast<char>(recording[i] ^ 4);
    const auto summary = Summarize(recording);
    // A length that says more than there is looks like an end.
    EXPECT_TRUE(!summary.ok() || summary->cut_off > 0) << i;
    recording[i] = static_cast<char>(recording[i] ^ 4);
  }
}

// Whether a sequence begins with a page that the cache copied from another one where prompts part:
// one that no sequence's table has.
bool BeginsAtABranch(const std::string& recording) {
  std::map<SequenceId, std::vector<int32_t>> rings;
  std::set<int32_t> kept;
  bool begins = false;
  Changed(recording, [&](const record::Entry& entry) {
    if (!entry.has_plan()) return true;
    const auto plan = DecodePlan(entry.plan()).value();
    for (const SequenceId released : plan.releases) rings.erase(released);
    for (const SequenceStart& start : plan.starts) {
      rings[start.sequence] = start.pages[PageKind::kWindow];
    }
    for (const PageCopy& copy : plan.page_copies[PageKind::kWindow]) {
      const bool own = std::ranges::any_of(
          rings, [&](const auto& ring) { return std::ranges::count(ring.second, copy.to) > 0; });
      begins |= own && kept.contains(copy.from);
      if (!own) kept.insert(copy.to);
    }
    for (const auto& [sequence, ring] : rings) {
      for (const int32_t page : ring) kept.erase(page);
    }
    return true;
  });
  return begins;
}

// A replay computes such prefixes anew: of windows, and of states.
TEST(Replay, SequencesThatBeginAtABranchAreIdentical) {
  for (const char* const architecture : {"gemma3", "qwen35", "granitehybrid"}) {
    SCOPED_TRACE(architecture);
    RecordedRun run = NewRun("branch", architecture);
    run.shared_prompt = 80;
    run.requests = 24;
    RecordLocal(run);
    const std::string recording = ReadWhole(run.file);
    EXPECT_TRUE(BeginsAtABranch(recording));
    ExpectIdentical(ReplayAll(run, recording));
  }
}

TEST(Replay, EachGenerationReplaysByItself) {
  for (const char* const architecture :
       {"llama", "gemma3", "gemma4", "qwen35", "lfm2", "granitehybrid"}) {  // rings; of states
    SCOPED_TRACE(architecture);
    RecordedRun run = NewRun("rotation", architecture);
    run.requests = 40;
    run.max_bytes = 24'000;
    RecordLocal(run, /*epochs=*/2);
    for (const std::string& file : {run.file, run.file + ".1"}) {
      const std::string recording = ReadWhole(file);
      ASSERT_FALSE(recording.empty());
      EXPECT_LE(recording.size(), 24'000u);
      bool restored = false;
      Changed(recording,
              [&](record::Entry& entry) { return restored |= entry.has_restored(), true; });
      EXPECT_TRUE(restored) << file;
      // The last file may have begun just before the end: how much times take varies.
      ExpectIdentical(ReplayAll(run, recording), file == run.file ? -1 : 0);
    }
    EXPECT_LT(Summarize(ReadWhole(run.file + ".1"))->last, Summarize(ReadWhole(run.file))->last);
  }
}

TEST(RecordWriter, WhatIsUnderWayGoesOnInTheNextFile) {
  const RecordedRun run = NewRun("under-way");
  record::Entry header, plan, other_plan, masks, result, filler;
  header.mutable_header()->set_version("1");
  EncodePlan(PlanOf(1, 0).Step(SampleOf(StepOf(1, 0, {1}))), *plan.mutable_plan());
  EncodePlan(PlanOf(1, 1).Step(SampleOf(StepOf(1, 1, {1}))), *other_plan.mutable_plan());
  EncodeMasks(1, 1, {{.step = 0, .allowed = {7}}}, *masks.mutable_masks());
  EncodeResult(ResultOf(1, 0, 1, 1), *result.mutable_result());
  filler.set_ledger(std::string(900, ' '));
  {
    ASSERT_OK_AND_ASSIGN(auto writer,
                         RecordWriter::Create(run.file, 1000, header.SerializeAsString()));
    for (const record::Entry* entry : {&plan, &other_plan, &masks, &result, &filler}) {
      ASSERT_TRUE(writer.Write(entry->SerializeAsString()).ok());
    }
  }
  std::string cases;
  Changed(ReadWhole(run.file), [&](record::Entry& entry) {
    cases += entry.has_header()   ? "header "
             : entry.has_plan()   ? Str("plan", entry.plan().iteration(), " ")
             : entry.has_masks()  ? "masks "
             : entry.has_ledger() ? "ledger"
                                  : "other ";
    return true;
  });
  EXPECT_EQ(cases, "header plan1 masks ledger");
}

// The first generation begins with iteration 0, the second one in the middle.
TEST(Replay, APlaceThatWasNotRecordedIsNamedBesideThoseThatWere) {
  RecordingSummary summary;
  EXPECT_THAT(std::string(summary.CheckPlace({1, 0}).message()),
              HasSubstr("the recording has no iteration with a result"));
  summary.epochs = {{2, {7, 9}}, {3, {0, 0}}};
  for (const RecordedPlace& there : {RecordedPlace{2, 7}, {2, 9}, {3, 0}}) {
    EXPECT_TRUE(summary.CheckPlace(there).ok());
  }
  for (const RecordedPlace& absent : {RecordedPlace{1, 8}, {2, 6}, {2, 10}, {3, 1}, {99, 3}}) {
    const absl::Status status = summary.CheckPlace(absent);
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(status.message(), Str("iteration ", absent.iteration, " of epoch ", absent.epoch,
                                    " is not in the recording, expected one of epoch 2 (iterations "
                                    "7 to 9), 3 (iteration 0)"));
  }
  for (uint64_t epoch = 4; epoch <= 1000; ++epoch) summary.epochs[epoch] = {0, epoch};
  const std::string many(summary.CheckPlace({1001, 0}).message());
  EXPECT_THAT(many, HasSubstr("5 (iterations 0 to 5), "));
  EXPECT_THAT(many, HasSubstr(", 1000 (iterations 0 to 1000)"));
  EXPECT_LT(many.size(), 1000u);
}

TEST(Replay, WhatIsMissingIsAnErrorThatSaysWhere) {
  RecordedRun run = NewRun("missing");
  run.end_layers = {2, 4};
  RecordLocal(run);
  const std::string recording = ReadWhole(run.file);
  const struct {
    std::function<bool(const record::Entry&)> left_out;
    const char* error;
  } rows[] = {
      {[](const record::Entry& entry) { return entry.has_header(); }, "begin with its header"},
      {[](const record::Entry& entry) { return entry.has_plan() && entry.plan().iteration() == 2; },
       "iteration 2 of epoch 1 has a result and no plan"},
      // The plan that starts them, with its result.
      {[](const record::Entry& entry) {
         return (entry.has_plan() && entry.plan().iteration() == 0) ||
                (entry.has_result() && entry.result().iteration() == 0);
       },
       "step of unknown sequence"}};
  for (const auto& row : rows) {
    const std::string changed =
        Changed(recording, [&](const record::Entry& entry) { return !row.left_out(entry); });
    const auto summary = Summarize(changed);
    const auto report = summary.ok() ? ReplayAll(run, changed) : summary.status();
    EXPECT_TRUE(absl::IsInvalidArgument(report.status()) || absl::IsNotFound(report.status()))
        << report.status();
    EXPECT_THAT(std::string(report.status().message()), HasSubstr(row.error));
  }
}

TEST(Recording, AFullQueueEndsItAndNotTheService) {
  RecordedRun run = NewRun("queue");
  run.queue_bytes = 200;
  RecordLocal(run);
  EXPECT_EQ(run.ended.size(), 1u);
  ASSERT_OK_AND_ASSIGN(const auto summary, Summarize(ReadWhole(run.file)));
  EXPECT_THAT(summary.end, HasSubstr("queue is full"));
}

TEST(Recording, AFullDiskEndsItAndNotTheService) {
  RecordedRun run = NewRun("disk");
  const std::string disk = std::filesystem::path(run.file).parent_path() / "disk";
  std::filesystem::create_directories(disk);
  if (mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=16k") != 0) {
    GTEST_SKIP() << "only root can mount a small tmpfs";
  }
  run.file = disk + "/recording";
  run.requests = 60;
  RecordLocal(run);  // to its end
  const std::string recording = ReadWhole(run.file);
  umount(disk.c_str());
  ASSERT_EQ(run.ended.size(), 1u);
  EXPECT_THAT(run.ended[0], HasSubstr("No space left"));
  ASSERT_OK_AND_ASSIGN(const auto summary, Summarize(recording));
  EXPECT_EQ(summary.cut_off, 0u);
  EXPECT_THAT(summary.end, testing::AnyOf("", HasSubstr("No space left")));
  ExpectIdentical(ReplayAll(run, recording));
}

TEST(Recording, WhatWasThereBeforeIsKeptOnce) {
  RecordedRun run = NewRun("before");
  run.requests = 1;
  RecordLocal(run);
  const std::string first = ReadWhole(run.file);
  RecordLocal(run);
  EXPECT_EQ(ReadWhole(run.file + ".1"), first);
}

TEST(Recording, ARequestIsDumpedByNumberAndByName) {
  RecordedRun run = NewRun("dump");
  {
    ASSERT_OK_AND_ASSIGN(auto recording, Recording::Open(run.Options()));
    SequenceStart second = StartOf(6, 3, {0});
    second.candidate = 1;
    (recording)->Plan(PlanOf(1, 0)
                          .Start(StartOf(5, 3, {0}))
                          .Start(second)
                          .Start(StartOf(7, 2, {1}))
                          .Step(SampleOf(StepOf(5, 0, {11, 12, 13}), 0))
                          .Step(SampleOf(StepOf(7, 0, {21, 22}))));
    IterationResult result = ResultOf(1, 0, 5, 14);
    result.steps[0].outputs[0].detail.logprob = -0.5f;
    result.steps.push_back(ResultOf(1, 0, 7, 23).steps[0]);
    recording->Result(result);
    (recording)->Ledger(
        R"({"epoch":1,"iteration":0,"arrivals":[{"request":3,"prompt_tokens":3}],)"
        R"("members":[{"request":3,"tokens":3},{"request":4,"tokens":2}],"ends":[]})");
    recording->EpochEnd(1, "a worker is lost");
    (recording)->Ledger(
        R"({"epoch":2,"iteration":0,"members":[],"ends":[{"request":3,"request_id":"mine"}]})");
    recording->Ledger("not JSON");
  }
  const std::string recording = ReadWhole(run.file);
  for (const char* id : {"3", "mine"}) {
    ASSERT_OK_AND_ASSIGN(const auto dump, DumpRequest(recording, id));
    EXPECT_THAT(dump, HasSubstr("arrived {\"request\":3"));
    EXPECT_THAT(dump, HasSubstr("candidate 1, prompt of 3 tokens"));
    EXPECT_THAT(dump, HasSubstr("tokens 11 12 13 -> 14 log probability -0.5"));
    EXPECT_THAT(dump, HasSubstr("epoch 1 ended: a worker is lost"));
    EXPECT_THAT(dump, HasSubstr("ended {\"request\":3"));
    EXPECT_THAT(dump, testing::Not(HasSubstr("21")));
  }
  EXPECT_TRUE(absl::IsNotFound(DumpRequest(recording, "nobody").status()));
}

}  // namespace
}  // namespace treadle
