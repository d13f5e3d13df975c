// Writes down what an engine is told and what it answers, so that it can be run again (replay.h).
//
// Recording never makes the caller wait: entries go to a bounded queue that one thread writes out.
// When the queue is full or the file cannot be written, the recording ends, for good, with an entry
// that says why where there is room for one, and service goes on.
//
// Two generations lie on disk, FILE and, when that is full, FILE.1, together `max_bytes` at most
// (and what the header and what lives take, if that is more). Each replays by itself.
//
// Thread safety: all methods from any thread. The engine that Wrap gives: as Engine.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"

namespace treadle {

// The setup that has to be known to run an engine's plans again.
struct RecordedSetup {
  std::string version;
  std::string fingerprint;          // of the model's files
  std::string backend;              // its description
  std::string configuration;        // lines of "name = value", of its flags
  std::vector<int64_t> end_layers;  // of each stage
  int64_t max_batch_tokens = 0;
  int64_t max_context = 0;
  PageCounts kv_pages;
};

// An adapter that plans name by its id.
struct RecordedAdapter {
  uint64_t id = 0;
  std::string path;
  std::string hash;  // AdapterFile::hash
};

struct RecordingOptions {
  std::string file;
  int64_t max_bytes = 256 << 20;
  int64_t queue_bytes = 32 << 20;
  RecordedSetup setup = {};
  // Once, when it has ended before its time; on any thread; must not block.
  std::function<void(const std::string& why)> ended = {};
};

class Recording {
 public:
  // InvalidArgument names the file, if it cannot be made.
  static absl::StatusOr<std::shared_ptr<Recording>> Open(RecordingOptions options);
  ~Recording();  // writes what is queued, for some seconds at most

  // An engine that does what `engine` does, and records it.
  static std::unique_ptr<Engine> Wrap(std::shared_ptr<Recording> recording,
                                      std::unique_ptr<Engine> engine);

  void Plan(const IterationPlan& plan);
  void Masks(uint64_t epoch, uint64_t iteration, const std::vector<OutputMask>& masks);
  void Result(const IterationResult& result);
  void Adapter(const RecordedAdapter& adapter);
  void EpochEnd(uint64_t epoch, const std::string& reason);
  // A line of JSON: who came, was in an iteration, and left.
  void Ledger(std::string line);

 private:
  struct State;
  explicit Recording(std::shared_ptr<State> state) : state_(std::move(state)) {}

  const std::shared_ptr<State> state_;  // also the thread's
};

}  // namespace treadle
