// Messages of workers to a master: an input is a list of their messages. The first byte says
// whether they begin with the hello, or only once an epoch stands and plans wait for their results.
// A message has a byte that says whose it is, and two bytes of length.
#include <chrono>
#include <thread>

#include "base/status.h"
#include "engine/plan/plan_messages.h"
#include "engine/remote/remote_engine.h"
#include "models/checkpoints/fingerprint.h"
#include "tests/engine/plan_builder.h"
#include "tests/fuzz/fake_control_streams.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/checkpoint_files.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

constexpr size_t kStages = 2;
constexpr const char* kVersion = "test";

RemoteEngineOptions Options() {
  static const std::shared_ptr<const Checkpoint> checkpoint = [] {
    static const ScratchFolder folder;
    return *Checkpoint::Open(*WriteTinyLlamaGguf(folder.path(), {.format = "q8_0"}));
  }();
  RemoteEngineOptions options;
  options.stages = {{.address = "a", .layers = {0, 1}}, {.address = "b", .layers = {1, 2}}};
  options.checkpoint = checkpoint;
  options.weights_from_master = true;
  options.version = kVersion;
  return options;
}

std::vector<IterationPlan> Plans() {
  const Step prompt = SampleOf(ScoredOf(StepOf(7, 0, {1, 2, 3}), -1, 1), 2);
  return {PlanOf(1, 0).Start(StartOf(7, 3, {0})).Step(prompt),
          PlanOf(1, 1).Step(SampleOf(PreviousSample(7, 3)))};
}

// Messages of an honest worker until its epoch stands, message by message.
std::vector<control::WorkerMessage> HonestWords() {
  std::vector<control::WorkerMessage> words(4);
  control::WorkerHello& hello = *words[0].mutable_hello();
  hello.set_protocol(kControlProtocol);
  hello.set_version(kVersion);
  hello.set_memory_available(uint64_t{1} << 32);
  hello.set_machine("m");
  control::Loaded& loaded = *words[1].mutable_loaded();
  loaded.set_weight_bytes(1000);
  loaded.set_memory_available(uint64_t{1} << 32);
  loaded.set_kv_heads(2);
  loaded.set_fingerprint(*Fingerprint(*Options().checkpoint));
  loaded.set_backend("reference");
  words[2].mutable_reserved();
  words[3].set_epoch_ready(1);
  return words;
}

using Workers = std::vector<std::shared_ptr<MasterEnd>>;

void Say(FuzzInput& input, const Workers& workers) {
  const size_t stage = input.Choose(workers.size());
  workers[stage]->Deliver(input.Bytes(input.Number<uint16_t>()));
}

void End(const Workers& workers) {
  for (const auto& worker : workers) worker->End(absl::InternalError("the input is over"));
}

void Run(std::string_view bytes) {
  FuzzInput input(bytes);
  const bool from_hello = input.Choose(2) == 0;
  Workers workers;
  // The master waits for its workers meanwhile.
  std::thread talk([&] {
    while (workers.size() < kStages) {
      for (auto& worker : TakeAttached()) workers.push_back(std::move(worker));
    }
    if (from_hello) {
      while (!input.empty()) Say(input, workers);
      return End(workers);
    }
    for (const control::WorkerMessage& word : HonestWords()) {
      for (const auto& worker : workers) worker->Deliver(word.SerializeAsString());
    }
  });
  const auto engine = RemoteEngine::Create(Options());
  talk.join();
  TREADLE_CHECK(engine.ok() || from_hello);
  if (!engine.ok() || from_hello) return;
  TREADLE_CHECK((*engine)->Start([] {}).ok());
  (*engine)->SetTracing(true);
  const std::vector<IterationPlan> plans = Plans();
  for (const IterationPlan& plan : plans) (*engine)->Submit(plan);
  size_t answered = 0;
  while (!input.empty()) {
    Say(input, workers);
    for (const IterationResult& result : (*engine)->TakeResults()) {
      TREADLE_CHECK(answered < plans.size());
      TREADLE_CHECK(result.steps.size() == plans[answered++].steps.size());
      for (const StepResult& step : result.steps) {
        TREADLE_CHECK(step.token() >= 0 && step.token() < TinyVocabulary());
      }
    }
  }
  (*engine)->TakeTrace();
  End(workers);
}

std::vector<std::string> Seeds() {
  const auto said = [](int stage, const google::protobuf::Message& message) {
    const std::string bytes = message.SerializeAsString();
    const auto size = static_cast<uint16_t>(bytes.size());
    return static_cast<char>(stage) +
           std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + bytes;
  };
  std::string honest(1, '\0');
  for (const control::WorkerMessage& word : HonestWords()) {
    honest += said(0, word) + said(1, word);
  }
  std::string answers(1, '\1');
  IterationResult result;
  result.epoch = 1;
  StepResult& step = result.steps.emplace_back();
  step.sequence = 7;
  control::WorkerMessage first, second, trace, tensor, failed, rendezvous, beat;
  step.outputs = {{.target = {-2.0f, {{1, -2.0f}}}},
                  {.target = {-3.0f, {}}},
                  {.token = 3, .detail = {-0.5f, {{3, -0.5f}, {4, -1.0f}}}}};
  EncodeResult(result, *first.mutable_result());
  result.iteration = 1;
  step.outputs = {{.token = 3}};
  EncodeResult(result, *second.mutable_result());
  trace.mutable_trace()->add_event()->set_epoch(1);
  tensor.mutable_tensor()->set_tensor(1);
  failed.mutable_failed()->set_epoch(1);
  failed.mutable_failed()->set_code(14);
  failed.mutable_failed()->set_message("lost");
  rendezvous.mutable_rendezvous()->set_epoch(1);
  rendezvous.mutable_rendezvous()->set_key("k");
  beat.mutable_heartbeat()->set_epoch(1);
  beat.mutable_heartbeat()->set_plans_received(1);
  for (const auto* message : {&trace, &tensor, &rendezvous, &beat, &first, &second, &failed}) {
    answers += said(1, *message);
  }
  control::WorkerMessage part;
  part.mutable_part()->set_data(second.SerializeAsString());
  part.mutable_part()->set_last(true);
  return {honest, answers, "\1" + said(1, first) + said(1, part)};
}

}  // namespace

const FuzzTarget kControlMasterTarget = {"control_master", 2048, Seeds, Run};

}  // namespace treadle
