// Messages of a master, and of the stage before, to a worker. The first byte of an input says which
// checkpoint the master has; messages follow, each with a byte that says whose it is and two bytes
// of length. What the worker asks of a tensor is answered as the byte that comes next says: with
// the master's tensor, with a byte of it changed and the right hash, or with something else.
#include <algorithm>

#include "base/sha256.h"
#include "base/status.h"
#include "engine/plan/plan_messages.h"
#include "engine/remote/received_checkpoint.h"
#include "engine/remote/worker/worker.h"
#include "models/checkpoints/fingerprint.h"
#include "tests/engine/plan_builder.h"
#include "tests/fuzz/fake_control_streams.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/checkpoint_files.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;

constexpr const char* kVersion = "test";
// For an answer that always comes, however busy the machine; and for one that may not.
constexpr milliseconds kPatience{5'000}, kMoment{20};
constexpr size_t kMax = 4096;  // a directory of a small model takes two thousand bytes
// A master may ask for as much as the machine has; an input may not.
constexpr int64_t kMaxTokens = 64, kMaxPages = 64, kMaxPageSize = 64;

// The worker's own.
const std::string& Model() {
  static const std::string path = [] {
    static const ScratchFolder folder;
    return *WriteTinyLlamaGguf(folder.path(), {.format = "q8_0", .layers = 1});
  }();
  return path;
}

const std::vector<std::unique_ptr<Checkpoint>>& MastersCheckpoints() {
  static const auto opened = [] {
    std::vector<std::unique_ptr<Checkpoint>> all;
    for (const std::string& model : TestedModels()) all.push_back(*Checkpoint::Open(model));
    return all;
  }();
  return opened;
}

std::string Sum(const std::string& bytes) {
  Sha256 sum;
  sum.Add(std::as_bytes(std::span(bytes)));
  return sum.Finish();
}

class Master {
 public:
  explicit Master(FuzzInput& input)
      : input_(input),
        sender_(*MastersCheckpoints()[input.Choose(MastersCheckpoints().size())]),
        stream_(AttachToServer()) {}

  void Say(std::string_view bytes) {
    control::MasterMessage message;
    if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
    if (message.has_configure()) {
      Limit(*message.mutable_configure());
      answers_ = FuzzInput(input_.Short());
    }
    if (const int64_t pages = message.reserve().whole(); pages > kMaxPages && pages <= INT32_MAX) {
      message.mutable_reserve()->set_whole(kMaxPages);
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
    if (configure.max_batch_tokens() > kMaxTokens) configure.set_max_batch_tokens(kMaxTokens);
    if (configure.page_size() > kMaxPageSize) configure.set_page_size(kMaxPageSize);
    if (configure.tensor_parallel() > 2) configure.set_tensor_parallel(2);
    // Else next to no input would get further than to be refused.
    static const std::string own = *Fingerprint(**Checkpoint::Open(Model()));
    configure.set_fingerprint(own);
  }

  // Until the worker has answered what it was told last.
  void Listen(milliseconds patience) {
    control::WorkerMessage said;
    while (stream_->Next(said, starved_ ? kMoment : patience)) {
      greeted_ = greeted_ || said.has_hello();
      if (said.has_tensor()) {
        starved_ = !Send(said.tensor());
      } else if (!said.has_heartbeat() && !said.has_progress() && !said.has_rendezvous()) {
        ready_ = said.kind_case() == control::WorkerMessage::kEpochReady || said.has_result();
        starved_ = false;
        return;
      }
    }
  }

  // Whether it is an answer to what was asked: else the worker waits on.
  bool Send(const control::TensorRequest& asked) {
    control::MasterMessage message;
    control::TensorChunk& chunk = *message.mutable_tensor();
    sender_.Answer(asked, chunk);
    const size_t how = answers_.Choose(4);
    std::string& data = *chunk.mutable_data();
    if (how == 1 && !data.empty() && chunk.total() == data.size()) {
      const size_t at = answers_.Number<uint16_t>() % data.size();
      data[at] = static_cast<char>(answers_.Byte());
      chunk.set_sha256(Sum(data));
    } else if (how == 2) {
      data = answers_.Short();
      chunk.set_total(data.size());
      chunk.set_sha256(Sum(data));
    } else if (how == 3) {
      const std::string_view bytes = answers_.Short();
      if (!chunk.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return false;
    }
    stream_->Deliver(message.SerializeAsString());
    return how != 3;
  }

  FuzzInput& input_;
  FuzzInput answers_{""};
  CheckpointSender sender_;
  const std::shared_ptr<WorkerEnd> stream_;
  bool greeted_ = false;
  bool starved_ = false;  // it waits for a tensor that it asked for, whatever it is told next
  bool ready_ = false;    // the last thing that it said is that an epoch stands, or a result
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
  control::MasterMessage hello, configure, reserve, begin, plan, end;
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
  reserve.mutable_reserve()->set_whole(8);
  begin.mutable_begin_epoch()->set_epoch(1);
  EncodePlan(PlanOf(1, 0).Start(StartOf(7, 3, {2, 1})).Step(SampleOf(StepOf(7, 0, {1, 2, 3}), 2)),
             *plan.mutable_plan());
  end.mutable_end_epoch()->set_epoch(1);
  control::MasterMessage tracing, masks, masked, next_epoch;
  tracing.set_tracing(true);
  EncodePlan(PlanOf(1, 1).Step(MaskedOf(PreviousSample(7, 3))), *masked.mutable_plan());
  const std::vector<uint32_t> any(MaskWords(TinyVocabulary()), ~uint32_t{0});
  EncodeMasks(1, 1, {{.step = 0, .output = 0, .allowed = any}}, *masks.mutable_masks());
  next_epoch.mutable_begin_epoch()->set_epoch(2);
  next_epoch.mutable_begin_epoch()->set_late_plans(true);
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
  std::vector<std::string> seeds = {
      '\0' + greeting + Said(kMaster, configure) + '\0' + Said(kMaster, tracing) + epoch +
          Said(kMaster, masks) + Said(kMaster, masked) + Said(kMaster, end) +
          Said(kMaster, next_epoch),
      '\0' + greeting + Said(kMaster, middle) + '\0' + Said(kMaster, reserve) +
          Said(kPrevious, follow) + Said(kMaster, forward) + Said(kNext, answer) +
          Said(kMaster, meeting) + Said(kPrevious, passed) + Said(kOtherMaster, hello)};
  const std::string honest = '\x10' + std::string(16, '\0');  // to be changed
  for (const auto& checkpoint : MastersCheckpoints()) {
    control::MasterMessage sent = configure;
    sent.mutable_configure()->set_end_layer(checkpoint->config().layers);
    CheckpointSender(*checkpoint).Describe(*sent.mutable_configure()->mutable_directory());
    const std::string seed = static_cast<char>(&checkpoint - MastersCheckpoints().data()) +
                             greeting + Said(kMaster, sent) + honest + epoch;
    if (seed.size() < kMax) seeds.push_back(seed);
  }
  return seeds;
}

}  // namespace

const FuzzTarget kControlWorkerTarget = {"control_worker", kMax, Seeds, Run};

}  // namespace treadle
