// Refusals of a worker that trains, by name, and that no client can make it do more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "base/version.h"
#include "engine/remote/control.pb.h"
#include "tests/engine/remote/driven_requests.h"
#include "tests/training/remote/train_through.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;
using Change = std::function<void(RemoteLayersOptions&)>;

// Why a client does not get its layers.
std::string Refusal(const std::string& model, std::vector<std::string> workers,
                    const Change& change = {}, const TrainingOptions& options = SmallRun()) {
  RemoteLayersOptions client = ClientOf(model, options, std::move(workers));
  if (change) change(client);
  const absl::Status status = Train(model, Through(client, options)).status();
  EXPECT_FALSE(status.ok());
  return status.ToString();
}

TEST(TrainingRefusals, NameWhatDiffers) {
  const std::string model = TinyModel();
  const auto worker = TrainingWorker(model);
  const std::vector<std::string> workers = {worker->address()};
  EXPECT_THAT(Refusal(model, workers, [](auto& client) { client.version = "0.0.7"; }),
              HasSubstr("the client is 0.0.7"));
  EXPECT_THAT(Refusal(TinyModel({.seed = 2, .layers = 4}), workers),
              HasSubstr(Str("worker ", workers[0], ": its model ", model, " is another file")));
  EXPECT_THAT(Refusal(model, workers, [](auto& client) { client.credentials.secret = "other"; }),
              HasSubstr("the worker has no control secret"));
  EXPECT_THAT(Refusal(model, workers, [](auto& client) { client.lora.targets = "q,w"; }),
              HasSubstr("'w' is none, expected some of q,k,v,o"));
  EXPECT_THAT(Refusal(model, workers, [](auto& client) { client.max_length = 4096; }),
              HasSubstr("sequences of tokens 4096, expected 1 to 256"));
  EXPECT_THAT(
      Refusal(model, workers, [](auto& client) { client.max_sequences = int64_t{1} << 32; }),
      HasSubstr("--batch-size times --max-length"));
  const std::string gone = TrainingWorker("")->address();
  EXPECT_THAT(Refusal(model, {gone},
                      [](auto& client) { client.patience = std::chrono::milliseconds(300); }),
              HasSubstr("DEADLINE_EXCEEDED: worker "));
  const auto bare = TrainingWorker("");
  EXPECT_THAT(Refusal(model, {bare->address()}), HasSubstr("has no model of its own"));
  WorkerOptions plain = ClusterOptions::QuietWorker();
  plain.model_path = model;
  const auto untrained = Worker::Start(std::move(plain));
  EXPECT_THAT(Refusal(model, {(*untrained)->address()}), HasSubstr("UNIMPLEMENTED"));
  EXPECT_TRUE(TrainThrough(model, SmallRun(), workers).ok());
}

// The stage of a worker that serves is not what the client wants.
TEST(TrainingRefusals, NameTheStage) {
  const std::string model = TinyModel();
  const auto refusal = [&](const std::function<void(ClusterOptions&)>& change,
                           std::vector<size_t> workers = {0}) {
    ClusterOptions options = TrainingCluster(model, 2);
    change(options);
    auto cluster = StartThreadCluster(options).value();
    EngineClient client(std::move(cluster.engine));
    EXPECT_EQ(client.WaitForRoom(), absl::OkStatus());
    std::vector<std::string> addresses;
    for (const size_t i : workers) addresses.push_back(cluster.workers[i]->address());
    return Refusal(model, addresses);
  };
  EXPECT_THAT(refusal([](auto&) {}), HasSubstr("they end with layer 2 of 4"));
  EXPECT_THAT(refusal([](auto&) {}, {1, 0}), HasSubstr("do not fit together"));
  const auto one = [&](const std::function<void(ClusterOptions&)>& change) {
    return refusal([&](ClusterOptions& options) {
      options.stages = 1;
      change(options);
    });
  };
  EXPECT_THAT(one([](auto& options) { options.engine.weights = "q8_0"; }),
              HasSubstr("its weights are 'q8_0', the client's ''"));
  EXPECT_THAT(one([](auto& options) { options.engine.tensor_parallel = 2; }),
              HasSubstr("a stage of 2 ranks"));
  EXPECT_THAT(one([](auto& options) { options.engine.compute = ComputeMode::kInt8; }),
              HasSubstr("packed for --compute int8, expected auto, int16 or exact"));
  EXPECT_THAT(one([](auto& options) { options.engine.compute = ComputeMode::kBf16; }),
              HasSubstr("packed for --compute bf16"));
  EXPECT_THAT(one([](auto& options) { options.engine.outlier_threshold = 3; }),
              HasSubstr("a rule of its own for outliers"));
  EXPECT_THAT(one([](auto& options) { options.engine.max_context = 16; }),
              HasSubstr("a context of 16 tokens, the client wants 24"));
}

TEST(TrainingRefusals, TwoSecretsDoNotMeet) {
  const std::string model = TinyModel();
  WorkerOptions options = TrainingCluster(model, 1).worker;
  options.model_path = model;
  options.credentials.secret = "sixteen characters";
  const auto worker = Worker::Start(std::move(options));
  const auto with = [](const std::string& secret) {
    return [secret](RemoteLayersOptions& client) { client.credentials.secret = secret; };
  };
  EXPECT_THAT(Refusal(model, {(*worker)->address()}),
              HasSubstr("wants proof of its control secret"));
  EXPECT_THAT(Refusal(model, {(*worker)->address()}, with("seventeen characters")),
              HasSubstr("has another control secret"));
  RemoteLayersOptions client = ClientOf(model, SmallRun(), {(*worker)->address()});
  client.credentials.secret = "sixteen characters";
  EXPECT_TRUE(Train(model, Through(client, SmallRun())).ok());
}

// A client that says what it likes.
class Stranger {
 public:
  explicit Stranger(const std::string& address)
      : stream_(OpenTrain(
            address, {.message = [](control::TrainAnswer&) {},
                      .closed = [this](const absl::Status& why) { closed_.set_value(why); }})) {}
  void Say(const std::function<void(control::TrainRequest&)>& fill) { stream_->Tell(fill); }
  std::string End() { return closed_.get_future().get().ToString(); }

 private:
  std::promise<absl::Status> closed_;
  std::shared_ptr<Stream<control::TrainRequest>> stream_;
};

TEST(TrainingRefusals, StrangersGetNoFurther) {
  const std::string model = TinyModel();
  const auto worker = TrainingWorker(model);
  const RemoteLayersOptions known = ClientOf(model, SmallRun(), {worker->address()});
  using Fill = std::function<void(control::TrainRequest&)>;
  const auto hello = [&](const std::function<void(control::TrainHello&)>& change) {
    return [&known, change](control::TrainRequest& request) {
      control::TrainHello& hello = *request.mutable_hello();
      hello.set_protocol(kControlProtocol);
      hello.set_version(kVersion);
      hello.set_fingerprint(known.fingerprint);
      hello.set_end_layer(4);
      hello.set_rank(4);
      hello.set_alpha(8);
      hello.set_targets("q");
      hello.set_max_sequences(2);
      hello.set_max_length(24);
      change(hello);
    };
  };
  const auto refusal = [&](const std::vector<Fill>& said) {
    Stranger stranger(worker->address());
    for (const Fill& fill : said) stranger.Say(fill);
    return stranger.End();
  };
  const Fill good = hello([](auto&) {});
  const Fill step = [](auto& request) { request.set_step(std::string(4 * 4 * 128 * 4, '\0')); };
  EXPECT_THAT(refusal({step}), HasSubstr("says hello first"));
  EXPECT_THAT(refusal({good, step, step, step, step}), HasSubstr("waits for the answer"));
  EXPECT_THAT(refusal({good, good}), HasSubstr("says hello once"));
  EXPECT_THAT(refusal({hello([](auto& h) { h.set_end_layer(5); })}),
              HasSubstr("layers 0 to 5 of 4"));
  EXPECT_THAT(refusal({hello([](auto& h) { h.set_first_layer(4); })}), HasSubstr("layers 4 to 4"));
  EXPECT_THAT(refusal({hello([](auto& h) { h.set_rank(-1); })}), HasSubstr("a rank of -1"));
  EXPECT_THAT(refusal({hello([](auto& h) { h.set_rank(1 << 20); })}), HasSubstr("a rank of"));
  EXPECT_THAT(refusal({hello([](auto& h) { h.set_alpha(-1); })}), HasSubstr("an alpha of -1"));
  EXPECT_THAT(refusal({hello([](auto& h) { h.set_max_sequences(5000); })}),
              HasSubstr("batches of sequences 5000"));
  EXPECT_TRUE(TrainThrough(model, SmallRun(), {worker->address()}).ok());
}

}  // namespace
}  // namespace treadle
