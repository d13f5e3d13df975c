// Training runs for tests: in this process, or through workers.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/op_cases/instrumented.h"
#include "models/checkpoints/fingerprint.h"
#include "tests/support/ranks/remote_cluster.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"
#include "training/remote/remote_layers.h"
#include "training/remote/training_guest.h"
#include "training/trainer.h"

namespace treadle {

// A run's results, bit for bit.
struct RunResult {
  std::vector<double> losses;
  std::vector<float> values;  // of the adapter
  friend bool operator==(const RunResult&, const RunResult&) = default;
};

// Two batches of two sequences a step, of different lengths, eight steps.
inline TrainingOptions SmallRun(uint64_t seed = 0) {
  TrainingOptions options;
  options.lora = {.rank = 4, .alpha = 8};
  options.optimizer = {.learning_rate = 0.02, .warmup = 2, .steps = 8};
  options.batch_size = options.accumulation = 2;
  options.max_length = 24;
  options.seed = seed;
  options.threads = 1;
  return options;
}

// The first is the longest.
inline std::vector<Example> SomeExamples(uint64_t seed, int64_t longest) {
  std::vector<Example> examples;
  for (int64_t number = 0; number < 10; ++number) {
    Example example;
    for (int64_t i = 0; i < longest - longest * number / 12; ++i) {
      example.tokens.push_back(
          static_cast<int32_t>((17 * number + 5 * i + i * i + 3 * seed) % 256));
    }
    example.counts.assign(example.tokens.size(), true);
    examples.push_back(std::move(example));
  }
  return examples;
}

// Runs all steps; `after_step` is told how many are done.
inline absl::StatusOr<RunResult> Train(const std::string& model, const TrainingOptions& options,
                                       const std::function<void(int64_t)>& after_step = {}) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(model));
  TREADLE_ASSIGN_OR_RETURN(
      const auto trainer,
      Trainer::Create(*checkpoint, SomeExamples(options.seed, options.max_length), options,
                      OwnFolder().path()));
  RunResult result;
  for (int64_t i = 0; i < options.optimizer.steps; ++i) {
    TREADLE_ASSIGN_OR_RETURN(const StepReport report, trainer->Step());
    result.losses.push_back(report.loss);
    if (after_step) after_step(i + 1);
  }
  const auto values = trainer->adapter().values();
  result.values.assign(values.begin(), values.end());
  return result;
}

// The options of a client of these workers.
inline RemoteLayersOptions ClientOf(const std::string& model, const TrainingOptions& options,
                                    std::vector<std::string> workers) {
  const auto checkpoint = Checkpoint::Open(model).value();
  RemoteLayersOptions client;
  client.workers = std::move(workers);
  client.fingerprint = *Fingerprint(*checkpoint);
  client.weights = options.weights.text();
  client.layers = checkpoint->config().layers;
  client.hidden = checkpoint->config().hidden;
  client.lora = options.lora;
  client.max_sequences = options.batch_size;
  client.max_length = options.max_length;
  client.silence = std::chrono::seconds(kInstrumented ? 60 : 10);
  return client;
}

inline TrainingOptions Through(const RemoteLayersOptions& client, TrainingOptions options) {
  options.connect = [client](TrainedAdapter& adapter) { return ConnectLayers(client, adapter); };
  return options;
}
inline absl::StatusOr<RunResult> TrainThrough(const std::string& model, TrainingOptions options,
                                              std::vector<std::string> workers,
                                              const std::function<void(int64_t)>& after_step = {}) {
  const RemoteLayersOptions client = ClientOf(model, options, std::move(workers));
  return Train(model, Through(client, std::move(options)), after_step);
}

inline std::string TinyModel(const TinyModelOptions& tiny = {.layers = 4}) {
  static int number = 0;
  return *WriteTinyLlamaGguf(OwnFolder().Folder(Str("model-", number++)), tiny);
}

// Workers in this process that train.
inline ClusterOptions TrainingCluster(const std::string& model, int stages) {
  ClusterOptions options;
  options.model = model;
  options.stages = stages;
  options.worker.guest = [](StageLender& lender) { return CreateTrainingGuest(lender, {}); };
  return options;
}
inline std::unique_ptr<Worker> TrainingWorker(const std::string& model) {
  WorkerOptions options = TrainingCluster(model, 1).worker;
  options.model_path = model;
  return Worker::Start(std::move(options)).value();
}

inline std::vector<std::string> AddressesOf(const std::vector<std::unique_ptr<Worker>>& workers) {
  std::vector<std::string> addresses;
  for (const auto& worker : workers) addresses.push_back(worker->address());
  return addresses;
}

}  // namespace treadle
