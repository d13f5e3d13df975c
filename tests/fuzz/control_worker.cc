// What a master, and the stage before, may say to a worker: an input is a list of messages, each
// with a byte that says whose it is and two bytes of length. Tensors that the worker asks for are
// sent, with the right hash, from what follows in the input.
#include <algorithm>

#include "base/sha256.h"
#include "base/status.h"
#include "engine/remote/plan_messages.h"
#include "engine/remote/received_checkpoint.h"
#include "engine/remote/worker.h"
#include "tests/engine/plan_builder.h"
#include "tests/fuzz/checkpoint_files.h"
#include "tests/fuzz/fake_control_streams.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;

constexpr const char* kVersion = "test";
// For an answer that always comes, however busy the machine; and for one that may not.
constexpr milliseconds kPatience{20'000}, kMoment{20};
// A master may ask for as much as the machine has; an input may not.
constexpr int64_t kMostTokens = 64, kMostPages = 64, kMostPageSize = 64;
constexpr uint64_t kMostTensorBytes = 1 << 16;

const std::string& Model() {
  static const std::string path = [] {
    static const ScratchFolder folder;
    return *WriteTinyLlamaGguf(folder.path(), {.format = "q8_0", .layers = 1});
  }();
  return path;
}

std::string Sum(const std::string& bytes) {
  Sha256 sum;
  sum.Add(std::as_bytes(std::span(bytes)));
  return sum.Finish();
}

class Master {
 public:
  explicit Master(FuzzInput& input) : input_(input), stream_(AttachToServer()) {}

  void Say(std::string_view bytes) {
    control::MasterMessage message;
    if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
    if (message.has_configure()) Limit(*message.mutable_configure());
    if (message.reserve() > kMostPages && message.reserve() <= INT32_MAX) {
      message.set_reserve(kMostPages);
    }
    stream_->Deliver(message.SerializeAsString());
    const auto kind = message.kind_case();
    const bool owes = kind == control::MasterMessage::kHello ||
                      kind == control::MasterMessage::kConfigure ||
                      kind == control::MasterMessage::kReserve;
    if (owes) Listen(greeted_ ? kPatience : kMoment);
    if (kind == control::MasterMessage::kBeginEpoch) Listen(kMoment);
    if (kind == control::MasterMessage::kPlan && ready_) Listen(kMoment);
  }

 private:
  void Limit(control::Configure& configure) {
    directory_ = configure.directory();
    if (configure.max_batch_tokens() > kMostTokens) configure.set_max_batch_tokens(kMostTokens);
    if (configure.page_size() > kMostPageSize) configure.set_page_size(kMostPageSize);
    if (configure.tensor_parallel() > 2) configure.set_tensor_parallel(2);
  }

  // Until the worker has answered what it was told last.
  void Listen(milliseconds patience) {
    control::WorkerMessage said;
    while (stream_->Next(said, patience)) {
      greeted_ = greeted_ || said.has_hello();
      if (said.has_tensor()) {
        Send(said.tensor());
      } else if (!said.has_heartbeat() && !said.has_progress() && !said.has_rendezvous()) {
        ready_ = said.kind_case() == control::WorkerMessage::kEpochReady || said.has_result();
        return;
      }
    }
  }

  void Send(const control::TensorRequest& asked) {
    control::MasterMessage message;
    control::TensorChunk& chunk = *message.mutable_tensor();
    const uint8_t honesty = input_.Byte();
    if (honesty == 255) {  // says what it likes
      const std::string_view bytes = input_.Short();
      if (!chunk.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
    }
    chunk.set_tensor(asked.tensor());
    chunk.set_constants(asked.constants());
    if (honesty == 254) chunk.set_problem("there is none");
    if (honesty < 254) {
      std::string data(input_.Short());
      if (!asked.constants() && asked.tensor() < static_cast<uint32_t>(directory_.tensors_size())) {
        data.resize(std::min(kMostTensorBytes,
                             directory_.tensors(static_cast<int>(asked.tensor())).bytes()));
      }
      chunk.set_total(data.size());
      chunk.set_sha256(Sum(data));
      chunk.set_data(std::move(data));
    }
    stream_->Deliver(message.SerializeAsString());
  }

  FuzzInput& input_;
  const std::shared_ptr<WorkerEnd> stream_;
  control::CheckpointDirectory directory_;
  bool greeted_ = false;
  bool ready_ = false;  // the last thing that it said is that an epoch stands, or a result
};

enum Speaker { kMaster, kPrevious, kNext, kOtherMaster, kSpeakers };

void Run(std::string_view bytes) {
  FuzzInput input(bytes);
  WorkerOptions options;
  options.model_path = Model();
  options.version = kVersion;
  options.ranks.threads = 1;
  options.pipeline = [](const PipelineRequest&, Rendezvous&) {
    return absl::StatusOr<std::unique_ptr<Communicator>>(absl::UnavailableError("there is none"));
  };
  const auto worker = Worker::Start(std::move(options));
  TREADLE_CHECK(worker.ok());
  auto master = std::make_unique<Master>(input);
  const std::shared_ptr<FollowedEnd> previous = FollowServer();
  std::vector<std::shared_ptr<FollowerEnd>> next;
  while (!input.empty()) {
    const size_t speaker = input.Choose(kSpeakers);
    const std::string_view message = input.Bytes(input.Number<uint16_t>());
    for (auto& stream : TakeFollowers()) next.push_back(std::move(stream));
    if (speaker == kMaster) master->Say(message);
    if (speaker == kPrevious) previous->Deliver(message);
    if (speaker == kNext && !next.empty()) next.back()->Deliver(message);
    if (speaker == kOtherMaster) AttachToServer()->Deliver(message);
  }
  TakeFollowers();
}

std::string Said(Speaker speaker, const google::protobuf::Message& message) {
  const std::string bytes = message.SerializeAsString();
  const auto size = static_cast<uint16_t>(bytes.size());
  return static_cast<char>(speaker) +
         std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + bytes;
}

std::vector<std::string> Seeds() {
  control::MasterMessage hello, configure, sent, reserve, begin, plan, end;
  hello.mutable_hello()->set_protocol(kControlProtocol);
  hello.mutable_hello()->set_version(kVersion);
  hello.mutable_hello()->set_master(1);
  hello.mutable_hello()->set_silence_ms(60'000);
  hello.mutable_hello()->set_heartbeat_ms(60'000);
  control::Configure& stage = *configure.mutable_configure();
  stage.set_stages(1);
  stage.set_tensor_parallel(1);
  stage.set_end_layer(1);
  stage.set_backend("cpu");
  stage.set_compute("exact");
  stage.set_kv_dtype("f32");
  stage.set_wire("f32");
  stage.set_data_plane("gloo");
  stage.set_max_batch_tokens(32);
  stage.set_page_size(16);
  stage.set_iteration_deadline_ms(20'000);
  sent = configure;
  // A model whose tensors all have the same few bytes.
  const auto checkpoint = *Checkpoint::Open(Model());
  CheckpointSender(*checkpoint).Describe(*sent.mutable_configure()->mutable_directory());
  const std::string tensors(checkpoint->tensors().size() * 2, '\0');
  reserve.set_reserve(8);
  begin.mutable_begin_epoch()->set_epoch(1);
  EncodePlan(PlanOf(1, 0).Start(StartOf(7, 3, {2, 1})).Step(SampleOf(StepOf(7, 0, {1, 2, 3}), 2)),
             *plan.mutable_plan());
  end.mutable_end_epoch()->set_epoch(1);
  const std::string greeting = Said(kMaster, hello);
  const std::string epoch = Said(kMaster, reserve) + Said(kMaster, begin) + Said(kMaster, plan);
  control::MasterMessage middle = configure, forward = begin, meeting;
  middle.mutable_configure()->set_stages(1);
  middle.mutable_configure()->set_weights("q8_0");
  forward.mutable_begin_epoch()->set_next_address("next");
  meeting.mutable_rendezvous()->set_epoch(1);
  meeting.mutable_rendezvous()->set_key("k");
  control::FollowMessage follow, passed;
  follow.mutable_hello()->set_master(1);
  follow.mutable_hello()->set_epoch(1);
  follow.mutable_hello()->set_stage(-1);
  *passed.mutable_plan() = plan.plan();
  control::FollowAnswer answer;
  answer.set_epoch(1);
  return {greeting + Said(kMaster, configure) + epoch + Said(kMaster, end),
          greeting + Said(kMaster, sent) + tensors + epoch,
          greeting + Said(kMaster, middle) + Said(kMaster, reserve) + Said(kPrevious, follow) +
              Said(kMaster, forward) + Said(kNext, answer) + Said(kMaster, meeting) +
              Said(kPrevious, passed) + Said(kOtherMaster, hello)};
}

}  // namespace

// A directory of a small model takes two thousand bytes.
const FuzzTarget kControlWorkerTarget = {"control_worker", 6000, Seeds, Run};

}  // namespace treadle
