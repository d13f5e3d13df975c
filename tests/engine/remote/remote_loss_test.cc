// Workers and masters that are lost, hang, or are not who they should be.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <thread>

#include "engine/remote/control.pb.h"
#include "engine/remote/control_streams.h"
#include "engine/remote/worker/held_stage.h"
#include "kernels/op_cases/instrumented.h"
#include "models/checkpoints/fingerprint.h"
#include "tests/engine/remote/driven_requests.h"
#include "tests/support/assert_ok.h"
#include "tests/support/faults/changing_files.h"
#include "tests/support/faults/fault_proxy.h"
#include "tests/support/ranks/remote_cluster.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

std::string TinyModel(uint64_t seed = 1) {
  TinyModelOptions options;
  options.seed = seed;
  const std::string folder = Str(OwnFolder().path(), "/seed", seed);
  std::filesystem::create_directories(folder);
  return *WriteTinyLlamaGguf(folder, options);
}

ClusterOptions TinyCluster(int stages) {
  ClusterOptions options;
  options.model = TinyModel();
  options.stages = stages;
  options.engine.iteration_deadline = milliseconds(kInstrumented ? 5000 : 1500);
  options.engine.silence = milliseconds(kInstrumented ? 5000 : 1500);
  return options;
}

// Runs requests to their end in one epoch, or in as many as it takes.
void ExpectRightAnswers(EngineClient& client, const std::string& model) {
  const auto requests = SomeRequests(6, 2);
  ASSERT_OK_AND_ASSIGN(auto local, MakeLocalEngine(model, 1));
  PlanDriver expected(DriverOptions(3), requests);
  ASSERT_EQ(EngineClient(std::move(local)).Run(expected), absl::OkStatus());
  for (uint32_t attempt = 0; attempt < 5; ++attempt) {
    if (attempt > 0) {
      ASSERT_EQ(client.Recover(), absl::OkStatus());
    }
    PlanDriver driver(DriverOptions(4 + attempt, 2), requests);
    if (!client.Run(driver).ok()) continue;
    EXPECT_EQ(DifferentAnswers(expected, driver, requests), "");
    return;
  }
  ADD_FAILURE() << "no epoch ran through: " << client.engine().status();
}

// -- workers that are lost ------------------------------------------------------------------------

// In a prompt: among the first iterations; while decoding: later.
TEST(RemoteLoss, AKilledWorkerIsNamedAndItsSuccessorTakesOver) {
  for (const int victim : {0, 1}) {
    for (const int after : {0, 25}) {
      ClusterOptions options = TinyCluster(2);
      ASSERT_OK_AND_ASSIGN(auto cluster, StartProcessCluster(options));
      EngineClient client(std::move(cluster.engine));
      const std::string address = cluster.workers[victim]->address();
      const auto requests = SomeRequests(40, 8);
      PlanDriver driver(DriverOptions(9, 2), requests);
      absl::Status error;
      for (uint64_t i = 0; error.ok() && i < 10000; ++i) {
        if (static_cast<int>(i) == after) cluster.workers[victim]->Kill();
        client.engine().Submit(driver.Next(1, i));
        const auto result = client.Next();
        error = result.status();
        if (result.ok()) driver.Absorb(*result);
      }
      EXPECT_THAT(error.message(), HasSubstr(Str("stage ", victim, " (", address, ")")));
      EXPECT_FALSE(client.engine().HasRoom());
      cluster.workers[victim] = std::make_unique<WorkerProcess>(address, options.model);
      ASSERT_EQ(cluster.workers[victim]->address(), address);
      ASSERT_EQ(client.Recover(), absl::OkStatus());
      ExpectRightAnswers(client, options.model);
    }
  }
}

TEST(RemoteLoss, AWorkerKilledWhileLoadingIsNamed) {
  ClusterOptions options = TinyCluster(1);
  options.engine.weights_from_master = true;
  WorkerProcess worker("127.0.0.1:0", "");
  // Loading cannot end before the worker does.
  ASSERT_OK_AND_ASSIGN(auto proxy, FaultProxy::Start(worker.address()));
  proxy->Inject(
      {MessageFault::Kind::kDrop, MessageFault::Where::kToWorker, "tensor", 3, milliseconds(0)});
  ASSERT_OK_AND_ASSIGN(auto engine, EngineOptionsFor(options, {proxy->address()}));
  engine.progress = [&](double) { worker.Signal(SIGKILL); };
  const absl::Status error = RemoteEngine::Create(std::move(engine)).status();
  EXPECT_THAT(error.message(), HasSubstr(Str("stage 0 (", proxy->address(), ")")));
  EXPECT_THAT(error.message(), HasSubstr("lost while loading"));
}

TEST(RemoteLoss, AHungWorkerIsNamedWithinTheDeadline) {
  ClusterOptions options = TinyCluster(2);
  ASSERT_OK_AND_ASSIGN(auto cluster, StartProcessCluster(options));
  EngineClient client(std::move(cluster.engine));
  cluster.workers[1]->Signal(SIGSTOP);
  PlanDriver driver(DriverOptions(9, 2), SomeRequests(4, 8));
  const absl::Status error = client.Run(driver);
  EXPECT_THAT(error.message(), HasSubstr(Str("stage 1 (", cluster.workers[1]->address(), ")")));
  cluster.workers[1]->Signal(SIGCONT);
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  ExpectRightAnswers(client, options.model);
}

// The worker that it replaced takes its turn when it is there again.
TEST(RemoteLoss, ASpareTakesThePlaceOfWhoIsLost) {
  ClusterOptions options = TinyCluster(2);
  const WorkerProcess spare("127.0.0.1:0", options.model);
  options.engine.spares = {spare.address()};
  ASSERT_OK_AND_ASSIGN(auto cluster, StartProcessCluster(options));
  EngineClient client(std::move(cluster.engine));
  ExpectRightAnswers(client, options.model);
  const std::string lost = cluster.workers[1]->address();
  cluster.workers[1]->Kill();
  EXPECT_THAT(client.WaitForError().message(), HasSubstr(Str("stage 1 (", lost, ")")));
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  ExpectRightAnswers(client, options.model);
  cluster.workers[1] = std::make_unique<WorkerProcess>(lost, options.model);
  spare.Signal(SIGKILL);
  EXPECT_THAT(client.WaitForError().message(), HasSubstr(Str("stage 1 (", spare.address(), ")")));
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  ExpectRightAnswers(client, options.model);
}

TEST(RemoteLoss, RestartWithoutTheWorkerSaysSoInTime) {
  ClusterOptions options = TinyCluster(2);
  options.engine.connect_deadline = milliseconds(3000);
  ASSERT_OK_AND_ASSIGN(auto cluster, StartProcessCluster(options));
  EngineClient client(std::move(cluster.engine));
  const std::string address = cluster.workers[1]->address();
  cluster.workers[1]->Kill();
  EXPECT_FALSE(client.WaitForError().ok());
  client.engine().Restart();
  const absl::Status error = client.WaitForRoom();
  EXPECT_THAT(error.message(),
              HasSubstr(Str("stage 1 (", address, "): not to be had within 3000")));
  cluster.workers[1] = std::make_unique<WorkerProcess>(address, options.model);
  ASSERT_EQ(client.Recover(), absl::OkStatus());
  ExpectRightAnswers(client, options.model);
}

// -- masters that are lost ------------------------------------------------------------------------

TEST(RemoteLoss, AWorkerKeepsItsWeightsForTheNextMaster) {
  ClusterOptions options = TinyCluster(1);
  std::atomic<int> loads = 0;
  options.worker.model_path = options.model;
  options.worker.log = [&](const std::string& line) {
    if (line.starts_with("loading")) ++loads;
  };
  ASSERT_OK_AND_ASSIGN(auto worker, Worker::Start(options.worker));
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK_AND_ASSIGN(auto engine, EngineOptionsFor(options, {worker->address()}));
    ASSERT_OK_AND_ASSIGN(auto remote, RemoteEngine::Create(std::move(engine)));
    EngineClient client(std::move(remote));
    ExpectRightAnswers(client, options.model);
  }
  EXPECT_EQ(loads, 1);
  options.engine.kv_pages = 32;  // another cache, made anew
  auto engine = EngineOptionsFor(options, {worker->address()});
  ASSERT_OK_AND_ASSIGN(auto remote, RemoteEngine::Create(*std::move(engine)));
  EXPECT_EQ(remote->kv_pages(), 32);
  EXPECT_EQ(loads, 2);
}

// A master by hand, which says hello and no more.
class SilentMaster {
 public:
  SilentMaster(const std::string& address, const std::string& version, milliseconds silence) {
    stream_ = OpenAttach(address,
                         {.message =
                              [this](control::WorkerMessage& said) {
                                if (said.has_hello()) Note(&SilentMaster::greeted_);
                              },
                          .closed = [this](const absl::Status&) { Note(&SilentMaster::closed_); }});
    control::MasterMessage message;
    message.mutable_hello()->set_protocol(kControlProtocol);
    message.mutable_hello()->set_version(version);
    message.mutable_hello()->set_master(1);
    message.mutable_hello()->set_silence_ms(static_cast<uint32_t>(silence.count()));
    message.mutable_hello()->set_heartbeat_ms(50);
    stream_->Send(std::move(message));
  }
  ~SilentMaster() {
    stream_->Abort();
    WaitFor(&SilentMaster::closed_);
  }
  // False also if it was closed instead.
  bool WaitUntilGreeted() { return WaitFor(&SilentMaster::greeted_); }
  bool WaitUntilClosed() { return WaitFor(&SilentMaster::closed_); }

 private:
  void Note(bool SilentMaster::*what) {
    MutexLock lock(mutex_);
    this->*what = true;
    changed_.NotifyAll();
  }
  bool WaitFor(bool SilentMaster::*what) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    MutexLock lock(mutex_);
    while (!(this->*what) && !closed_) {
      if (!changed_.WaitUntil(mutex_, deadline)) return false;
    }
    return this->*what;
  }
  Mutex mutex_;
  CondVar changed_;
  bool greeted_ = false;
  bool closed_ = false;
  std::shared_ptr<Stream<control::MasterMessage>> stream_;
};

TEST(RemoteLoss, ASecondMasterIsRefusedUntilTheFirstIsGoneOrSilent) {
  ClusterOptions options = TinyCluster(1);
  options.worker.model_path = options.model;
  options.worker.version = options.engine.version = "test";
  options.engine.silence = milliseconds(300);
  ASSERT_OK_AND_ASSIGN(auto worker, Worker::Start(options.worker));
  const auto attach = [&] {
    auto engine = EngineOptionsFor(options, {worker->address()});
    return RemoteEngine::Create(*std::move(engine)).status();
  };
  {
    SilentMaster patient(worker->address(), "test", std::chrono::seconds(60));
    ASSERT_TRUE(patient.WaitUntilGreeted());
    const absl::Status refused = attach();
    EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(refused.message(), HasSubstr("serves another master"));
    EXPECT_THAT(refused.message(), HasSubstr(worker->address()));
  }
  options.engine.silence = milliseconds(3000);
  EXPECT_EQ(attach(), absl::OkStatus());
  // The master before may still be about to go.
  std::optional<SilentMaster> silent;
  for (int tries = 0; tries < 100; ++tries) {
    silent.emplace(worker->address(), "test", milliseconds(200));
    if (silent->WaitUntilGreeted()) break;
    std::this_thread::sleep_for(milliseconds(50));
  }
  ASSERT_TRUE(silent->WaitUntilGreeted());
  EXPECT_TRUE(silent->WaitUntilClosed());
  EXPECT_EQ(attach(), absl::OkStatus());
}

// A large model's sum takes a while, and a worker that takes a lost one's place is waited for.
TEST(RemoteLoss, AWorkerDoesNotReadTheMastersOwnFilesForTheirSum) {
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(TinyModel(1)));
  const std::string own = FilesHere(*checkpoint);
  control::Configure wanted;
  wanted.set_fingerprint("the master's sum");  // which is not the file's
  EXPECT_EQ(CheckModel(*checkpoint, wanted, own), absl::OkStatus());
  for (const std::string& files : {std::string(), own + "1"}) {
    const absl::Status other = CheckModel(*checkpoint, wanted, files);
    EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition) << other;
    EXPECT_THAT(other.message(), HasSubstr(checkpoint->path() + " is another file"));
  }
}

// The master of before is gone; the next one has the model in a file of its own, and wants a stage
// that the worker has to load again, from what lies under its path by now.
TEST(RemoteLoss, AWorkerLoadsWhatItSaysItHasLoaded) {
  const TestFolder folder;
  const std::string good = WriteTinyLlamaFolder(folder.Folder("good"), {}).value();
  TinyModelOptions other;
  other.seed = 2;
  const std::string other_weights =
      ReadWhole(WriteTinyLlamaFolder(folder.Folder("other"), other).value() + "/model.safetensors");
  const std::string config = ReadWhole(good + "/config.json");
  const std::string rope = WithRopeTheta(config, "40000.0");
  folder.Write("good/config.json", WithRopeTheta(config, "10000.0"));
  const std::string same_weights = ReadWhole(good + "/model.safetensors");
  const struct {
    const char* file;
    const std::string* bytes;
    bool right;
  } kChanges[] = {{"model.safetensors", &other_weights, false},
                  {"config.json", &rope, false},
                  {"model.safetensors", &same_weights, true}};
  int number = 0;
  for (const auto& [file, bytes, right] : kChanges) {
    for (const FileEvent event : kFileEvents) {
      SCOPED_TRACE(Str(file, ", event ", static_cast<int>(event)));
      ClusterOptions options = TinyCluster(1);
      options.model = good;
      options.worker.model_path = folder / Str("worker", ++number);
      std::filesystem::copy(good, options.worker.model_path);
      ASSERT_OK_AND_ASSIGN(auto worker, Worker::Start(options.worker));
      {
        ASSERT_OK_AND_ASSIGN(auto engine, EngineOptionsFor(options, {worker->address()}));
        ASSERT_OK_AND_ASSIGN(auto remote, RemoteEngine::Create(std::move(engine)));
      }
      ChangeFile(options.worker.model_path + "/" + file, event, *bytes);
      ++options.engine.max_batch_tokens;
      ASSERT_OK_AND_ASSIGN(auto engine, EngineOptionsFor(options, {worker->address()}));
      auto remote = RemoteEngine::Create(std::move(engine));
      if (right) {
        ASSERT_TRUE(remote.ok()) << remote.status();
        EngineClient client(*std::move(remote));
        ExpectRightAnswers(client, options.model);
        continue;
      }
      EXPECT_EQ(remote.status().code(), absl::StatusCode::kFailedPrecondition) << remote.status();
      EXPECT_THAT(remote.status().message(),
                  HasSubstr(Str(options.worker.model_path, "/", file, " is another file")));
    }
  }
}

// The walk of file_changes_test.cc over a worker that loads.
TEST(RemoteLoss, FilesThatChangeWhileAWorkerLoadsAreNoticed) {
  const TestFolder folder;
  const std::string good = WriteTinyLlamaFolder(folder.Folder("good"), {.layers = 1}).value();
  const std::string config = ReadWhole(good + "/config.json");
  folder.Write("good/config.json", WithRopeTheta(config, "10000.0"));
  ClusterOptions options = TinyCluster(1);
  options.model = good;
  const std::string path = options.worker.model_path = folder / "worker";
  std::filesystem::copy(good, path);
  ASSERT_OK_AND_ASSIGN(auto worker, Worker::Start(options.worker));
  const auto attach = [&] {
    ++options.engine.max_batch_tokens;  // another stage than the last
    auto engine = EngineOptionsFor(options, {worker->address()});
    return RemoteEngine::Create(*std::move(engine));
  };
  for (const char* name : {"config.json", "model.safetensors"}) {
    const std::string file = path + "/" + name, bytes = ReadWhole(file);
    std::string other = bytes;
    if (name[0] == 'c') {
      other = WithRopeTheta(config, "40000.0");
    } else {
      for (size_t i = bytes.size() / 2; i < bytes.size(); ++i) other[i] ^= 1;
    }
    int steps = 0;
    {
      ChangingFiles counted(file);
      ASSERT_EQ(attach().status(), absl::OkStatus());
      steps = counted.steps();
    }
    ASSERT_GT(steps, 4);
    int right = 0, refused = 0;
    for (int step = 0; step < steps; ++step) {
      for (const FileEvent event : kFileEvents) {
        SCOPED_TRACE(Str(name, ", event ", static_cast<int>(event), " before step ", step));
        ChangeFile(file, FileEvent::kRenamedOver, bytes);
        ChangingFiles changing(file);
        changing.Plan(step, event, other);
        auto remote = attach();
        if (!remote.ok()) {
          ++refused;
          EXPECT_THAT(remote.status().message(), HasSubstr(file));
          continue;
        }
        ++right;
        EngineClient client(*std::move(remote));
        ExpectRightAnswers(client, good);
      }
    }
    EXPECT_GT(right, 0);
    EXPECT_GT(refused, 0);
    ChangeFile(file, FileEvent::kRenamedOver, bytes);
  }
}

// Plans of a stranger, or of an old epoch, do nothing.
TEST(RemoteLoss, StrangersCannotFollow) {
  ClusterOptions options = TinyCluster(2);
  ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(options));
  Mutex mutex;
  CondVar changed;
  absl::Status status;
  bool closed = false;
  auto stream = OpenFollow(cluster.workers[1]->address(), {.message = [](control::FollowAnswer&) {},
                                                           .closed =
                                                               [&](const absl::Status& why) {
                                                                 MutexLock lock(mutex);
                                                                 status = why;
                                                                 closed = true;
                                                                 changed.NotifyAll();
                                                               }});
  control::FollowMessage plan;
  plan.mutable_plan()->set_epoch(1);
  stream->Send(std::move(plan));
  control::FollowMessage hello;
  hello.mutable_hello()->set_master(12345);
  hello.mutable_hello()->set_epoch(1);
  stream->Send(std::move(hello));
  {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    MutexLock lock(mutex);
    while (!closed && changed.WaitUntil(mutex, deadline)) {
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  }
  EngineClient client(std::move(cluster.engine));
  ExpectRightAnswers(client, options.model);
}

// -- workers that are not who they should be ------------------------------------------------------

absl::Status CreationError(const ClusterOptions& options) {
  return StartThreadCluster(options).status();
}

TEST(RemoteLoss, MismatchedWorkersAreRefusedByName) {
  ClusterOptions options = TinyCluster(2);
  options.worker.version = "0.0.7";
  absl::Status error = CreationError(options);
  EXPECT_EQ(error.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(error.message(), HasSubstr("0.0.7"));
  EXPECT_THAT(error.message(), HasSubstr("stage "));

  options = TinyCluster(2);
  options.worker.compute = "int8";
  error = CreationError(options);
  EXPECT_EQ(error.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(error.message(), HasSubstr("computes int8, this master wants exact"));

  options = TinyCluster(1);
  options.engine.connect_deadline = milliseconds(400);
  WorkerOptions other = options.worker;
  other.model_path = TinyModel(2);
  auto worker = Worker::Start(other);
  ASSERT_TRUE(worker.ok());
  auto engine = EngineOptionsFor(options, {(*worker)->address()});
  error = RemoteEngine::Create(*std::move(engine)).status();
  EXPECT_EQ(error.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(error.message(), HasSubstr(other.model_path + " is another file"));

  other.model_path = "";
  worker = Worker::Start(other);
  engine = EngineOptionsFor(options, {(*worker)->address()});
  error = RemoteEngine::Create(*std::move(engine)).status();
  EXPECT_THAT(error.message(), HasSubstr("has no model of its own"));
}

TEST(RemoteLoss, GridsThatCannotBeAreRefused) {
  ClusterOptions options = TinyCluster(1);
  auto engine = EngineOptionsFor(options, {"127.0.0.1:1", "127.0.0.1:1"});
  EXPECT_THAT(RemoteEngine::Create(*engine).status().message(), HasSubstr("is named twice"));
  engine = EngineOptionsFor(options, {"127.0.0.1:1"});
  engine->stages[0].layers.end = 1;
  EXPECT_THAT(RemoteEngine::Create(*engine).status().message(),
              HasSubstr("the stages have 1 layers, the model has 2"));
  engine = EngineOptionsFor(options, {});
  EXPECT_THAT(RemoteEngine::Create(*engine).status().message(), HasSubstr("no workers"));

  options.worker.model_path = options.model;
  ASSERT_OK_AND_ASSIGN(auto worker, Worker::Start(options.worker));
  engine = EngineOptionsFor(options, {worker->address()});
  engine->stages[0].weight_bytes = uint64_t{1} << 60;
  const absl::Status error = RemoteEngine::Create(*engine).status();
  EXPECT_EQ(error.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(error.message(), HasSubstr("stage 0"));
}

// A socket that accepts and never says anything.
class DeafListener {
 public:
  DeafListener() {
    socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    TREADLE_CHECK(bind(socket_, reinterpret_cast<sockaddr*>(&address), size) == 0);
    TREADLE_CHECK(listen(socket_, 8) == 0);
    getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
    address_ = Str("127.0.0.1:", ntohs(address.sin_port));
  }
  ~DeafListener() { close(socket_); }
  const std::string& address() const { return address_; }

 private:
  int socket_ = -1;
  std::string address_;
};

TEST(RemoteLoss, UnreachableLateAndForeignWorkersAreNamed) {
  ClusterOptions options = TinyCluster(1);
  options.engine.connect_deadline = milliseconds(kInstrumented ? 3000 : 600);
  options.engine.silence = milliseconds(kInstrumented ? 2000 : 400);
  const auto error_at = [&](const std::string& address) {
    auto engine = EngineOptionsFor(options, {address});
    const absl::Status error = RemoteEngine::Create(*std::move(engine)).status();
    EXPECT_THAT(error.message(), HasSubstr(Str("stage 0 (", address, ")")));
    return error;
  };
  std::string closed;
  {
    DeafListener deaf;
    closed = deaf.address();
    const absl::Status late = error_at(deaf.address());
    EXPECT_THAT(late.message(), HasSubstr(Str("not to be had within ",
                                              options.engine.connect_deadline.count(), " ms")));
  }
  EXPECT_EQ(error_at(closed).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(error_at("no-such-host.invalid:7001").ok());
}

}  // namespace
}  // namespace treadle
