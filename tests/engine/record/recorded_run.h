// Recordings for tests: of a tiny model's engine, and what it takes to run them again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/record/op_check.h"
#include "engine/record/replay.h"
#include "engine/stage_ranks.h"
#include "kernels/backend.h"
#include "tests/support/whole_file.h"

namespace treadle {

namespace record {
class Entry;
}  // namespace record

struct RecordedRun {
  std::string model;  // a file
  std::string file;   // the recording's, in an empty folder
  std::vector<int64_t> end_layers = {4};
  KvPaging paging = {};  // the model's
  PageCounts pages = {};
  int ranks = 1;  // of each stage
  ComputeMode compute = ComputeMode::kExact;
  int64_t max_bytes = 256 << 20;  // as RecordingOptions
  int64_t queue_bytes = 32 << 20;
  uint32_t seed = 1;
  int requests = 12;
  int32_t shared_prompt = 0;            // tokens that all prompts begin with
  std::vector<std::string> ended = {};  // what the recording told of its end

  RecordingOptions Options();
};

// A model and a folder of the test's own.
RecordedRun NewRun(const std::string& name, const char* architecture = "llama",
                   const char* format = "f32");
// `epochs` epochs of random requests of all kinds, by random plans, through the engine and into the
// recording; the last plans of all epochs but the last one are left without a result.
void RecordRequests(RecordedRun& run, std::unique_ptr<Engine> engine, int epochs = 1);
// The same through an engine of this process.
void RecordLocal(RecordedRun& run, int epochs = 1);

using WrapBackend = std::function<std::unique_ptr<Backend>(std::unique_ptr<Backend>)>;
// As the recording says, on CPUs that may be wrapped, and whose ops may be checked.
std::unique_ptr<ReplayStages> StagesFor(const RecordedRun& run, const RecordingSummary& summary,
                                        WireType wire = WireType::kF32,
                                        const WrapBackend& wrap = {}, OpCheck* check = nullptr);
absl::StatusOr<ReplayReport> ReplayAll(const RecordedRun& run, const std::string& recording,
                                       WireType wire = WireType::kF32,
                                       const ReplayOptions& options = {});

// The recording with what `change` makes of each entry; false leaves one out.
std::string Changed(const std::string& recording,
                    const std::function<bool(record::Entry& entry)>& change);

}  // namespace treadle
