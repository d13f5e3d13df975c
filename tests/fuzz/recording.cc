// Recordings: what is told of them, a request's life, and a replay of their plans. Checksums would
// keep almost every change out, so an input is a list of entries without them, two bytes of length
// before each, or, by its first byte, a file as it is.
#include "base/checksum.h"
#include "base/status.h"
#include "engine/plan/plan_messages.h"
#include "engine/plan/sequence_table.h"
#include "engine/record/record.pb.h"
#include "engine/record/record_file.h"
#include "engine/record/replay.h"
#include "tests/engine/plan_builder.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace treadle {
namespace {

constexpr std::string_view kMagic = "TREADLE\2";

std::string Framed(std::string_view entry) {
  const auto size = static_cast<uint32_t>(entry.size());
  const uint64_t checksum =
      Checksum(size, reinterpret_cast<const std::byte*>(entry.data()), entry.size());
  std::string framed(reinterpret_cast<const char*>(&size), sizeof size);
  framed.append(reinterpret_cast<const char*>(&checksum), sizeof checksum);
  return framed.append(entry);
}

// Does with plans what stages do before they compute.
class NoStages final : public PlanRunner {
 public:
  absl::Status BeginEpoch() override {
    table_.Clear();
    return absl::OkStatus();
  }
  absl::StatusOr<IterationResult> Run(IterationPlan plan, std::vector<OutputMask>) override {
    TREADLE_RETURN_IF_ERROR(table_.Check(plan));
    IterationResult result;
    for (const SequenceId sequence : plan.releases) table_.Release(sequence);
    TREADLE_RETURN_IF_ERROR(table_.Start(plan.starts));
    for (const Step& step : plan.steps) {
      table_.At(step.sequence).Enter(step.first_position, step.tokens);
      StepResult& made = result.steps.emplace_back();
      made.sequence = step.sequence;
      for (const RowOutput& asked : step.outputs)
        made.outputs.push_back({.token = asked.sample ? 1 : -1});
    }
    return result;
  }

 private:
  SequenceTable table_{{.page_size = 4,
                        .num_pages = PageCounts(16, 16),
                        .window = 5,
                        .vocab = 50,
                        .context = 40,
                        .max_batch_tokens = 24}};
};

void Run(std::string_view bytes) {
  FuzzInput input(bytes);
  std::string recording;
  if (input.Choose(2) == 0) {
    recording = kMagic;
    while (!input.empty()) recording += Framed(input.Bytes(input.Number<uint16_t>()));
  } else {
    recording = input.Rest();
  }
  const auto summary = Summarize(recording);
  if (!summary.ok()) return;
  TREADLE_CHECK(summary->iterations >= 0 && summary->cut_off <= recording.size());
  TREADLE_CHECK(summary->pages_used.FitsIn(summary->setup.kv_pages));
  for (const char* const id : {"1", "mine"}) DumpRequest(recording, id).IgnoreError();
  NoStages runner;
  Replay(recording, summary->setup.max_batch_tokens, runner, {}).IgnoreError();
}

std::vector<std::string> Seeds() {
  std::vector<record::Entry> entries(7);
  record::Header& header = *entries[0].mutable_header();
  header.add_end_layer(2);
  EncodePages(4, *header.mutable_pages());
  header.set_max_batch_tokens(8);
  EncodePlan(PlanOf(1, 4).Start(StartOf(7, 3, {0})).Step(StepOf(7, 0, {1, 2, 3, 4})),
             *entries[1].mutable_restored());
  EncodePlan(PlanOf(1, 5).Start(StartOf(8, 2, {1, 2})).Step(SampleOf(StepOf(8, 0, {5, 6}), 1)),
             *entries[2].mutable_plan());
  EncodeMasks(1, 5, {{.step = 0, .output = 0, .allowed = {1, 2}}}, *entries[3].mutable_masks());
  IterationResult result;
  result.epoch = 1;
  result.iteration = 5;
  result.steps.resize(1);
  result.steps[0].sequence = 8;
  result.steps[0].outputs = {{.token = 9, .detail = {-0.5f, {{9, -0.5f}}}}};
  EncodeResult(result, *entries[4].mutable_result());
  entries[5].set_ledger(
      R"({"epoch":1,"iteration":5,"arrivals":[{"request":1}],"members":[{"request":1}],)"
      R"("ends":[{"request":1,"request_id":"mine"}]})");
  entries[6].mutable_epoch_end()->set_reason("a worker is lost");
  std::string loose(1, '\0'), file = "\1" + std::string(kMagic);
  for (const record::Entry& entry : entries) {
    const std::string bytes = entry.SerializeAsString();
    const auto size = static_cast<uint16_t>(bytes.size());
    loose += std::string(reinterpret_cast<const char*>(&size), sizeof size) + bytes;
    file += Framed(bytes);
  }
  return {loose, file};
}

}  // namespace

const FuzzTarget kRecordingTarget = {"recording", 4096, Seeds, Run};

}  // namespace treadle
