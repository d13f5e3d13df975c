// The treadle binary over several ranks and worker processes: the same answers as one process
// gives, and what its users see when a worker dies, hangs, or does not fit.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "base/status.h"
#include "kernels/backend.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/served_binary.h"
#include "tests/server/cli/streamed_answers.h"
#include "tests/support/assert_ok.h"
#include "tests/support/faults/changing_files.h"
#include "tests/support/faults/process_losses.h"
#include "tests/support/in_time.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using testing::HasSubstr;

constexpr int kLongAnswer = 3000;
constexpr auto kPatience = std::chrono::minutes(5);

const std::string& Model() { return OwnModel(SlowModel()); }

// Whether the process goes in time.
bool Goes(int process) {
  return ComesTrue([&] {
    std::ifstream file("/proc/" + std::to_string(process) + "/stat");
    std::string line;
    return !std::getline(file, line) || line[line.rfind(')') + 2] == 'Z';
  });
}

std::string Flags(const std::string& words) {
  return Str(ServedBinary::kGrpcOnly, "--threads 2 --model ", Model(), " ", words);
}

class Server : public ServedBinary {
 public:
  explicit Server(const std::string& words, const std::vector<std::string>& more = {})
      : ServedBinary(Flags(words), more), workers_(ChildrenOf(pid())) {}

  const std::vector<int>& workers() const { return workers_; }  // when it began, by stage

  // The tokens of an answer, or why there is none.
  grpc::Status Ask(int tokens, std::vector<int>* answer = nullptr) {
    return AskAndDisturb({}, answer, tokens);
  }
  // Does something to the server while a long answer is under way; how that answer ends.
  grpc::Status AskAndDisturb(std::function<void()> disturb, std::vector<int>* answer = nullptr,
                             int tokens = kLongAnswer) {
    return Read(GreedyRequest(tokens), [&](const v1::GenerateResponse& message) {
      const auto& ids = message.output().token_ids();
      if (answer != nullptr) answer->insert(answer->end(), ids.begin(), ids.end());
      if (disturb) std::exchange(disturb, {})();
    });
  }
  // A long answer is the same, whatever is done meanwhile.
  void ExpectUndisturbed(const std::function<void()>& disturb) {
    std::vector<int> undisturbed, answer;
    EXPECT_TRUE(Ask(kLongAnswer, &undisturbed).ok());
    const grpc::Status status = AskAndDisturb(disturb, &answer);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(answer.size(), size_t{kLongAnswer});
    EXPECT_EQ(answer, undisturbed);
  }
  grpc::Status Ask(const v1::GenerateRequest& request, Said& said,
                   std::atomic<int>* messages = nullptr) {
    return Read(request, [&](const v1::GenerateResponse& message) {
      if (messages != nullptr) ++*messages;
      Hear(message, said);
    });
  }

  v1::GetModelInfoResponse Info() {
    grpc::ClientContext context;
    v1::GetModelInfoResponse info;
    stub().GetModelInfo(&context, {}, &info);
    return info;
  }

 private:
  template <typename Take>
  grpc::Status Read(const v1::GenerateRequest& request, const Take& take) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    const auto reader = stub().GenerateStream(&context, request);
    for (v1::GenerateResponse message; reader->Read(&message);) take(message);
    return reader->Finish();
  }

  const std::vector<int> workers_;
};

std::vector<int> AnswerInProcess(const std::string& words) {
  const std::string output =
      RunToEnd(Treadle("generate --max-new-tokens 40 --ignore-eos --json --threads 2 " + words,
                       {"--model", Model(), "--prompt", "Once upon a time"}));
  return nlohmann::json::parse(
      output.substr(output.find('{'), output.rfind('}') + 1 - output.find('{')))["token_ids"];
}

// The sockets of servers that are killed are in the folder that goes with this process, too.
class SocketsInOwnFolder : public testing::Environment {
  void SetUp() override { setenv("TMPDIR", OwnFolder().path().c_str(), /*overwrite=*/1); }
};
const auto* const kSockets = testing::AddGlobalTestEnvironment(new SocketsInOwnFolder);

TEST(ParallelBinary, WorkersGiveTheSameAnswerAsOneProcess) {
  const std::vector<int> expected = AnswerInProcess("");
  ASSERT_EQ(expected.size(), 40u);
  EXPECT_EQ(AnswerInProcess("--pipeline-parallel 3"), expected);
  EXPECT_EQ(AnswerInProcess("--pipeline-parallel 3 --plan-forwarding late"), expected);
  for (const char* from : {"file", "master"}) {
    Server server(Str("--pipeline-parallel 2 --weights-from ", from));
    EXPECT_EQ(server.workers().size(), 2u);
    std::vector<int> answer;
    const grpc::Status status = server.Ask(40, &answer);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(answer, expected);
    EXPECT_THAT(server.Info().backend(), HasSubstr("2 stages of cpu"));
    EXPECT_THAT(server.output(), HasSubstr("pipeline-parallel = 2\n"));
    EXPECT_EQ(server.Stop(), 0) << server.output();
    for (const int worker : server.workers()) EXPECT_TRUE(Goes(worker));
  }
}

// Ranks and stages together: any split into stages gives the same tokens.
TEST(ParallelBinary, TheWholeGridAnswers) {
  for (const char* ranks : {"1", "2", "4"}) {
    const std::vector<int> expected = AnswerInProcess(Str("--tensor-parallel ", ranks));
    EXPECT_EQ(expected.size(), 40u);
    for (const char* stages : {"2", "3", "4"}) {
      EXPECT_EQ(AnswerInProcess(Str("--tensor-parallel ", ranks, " --pipeline-parallel ", stages)),
                expected)
          << stages << " stages of " << ranks << " ranks";
    }
  }
}

// A worker knows every word of --compute that help names.
TEST(ParallelBinary, EveryComputeModeRunsOnWorkersAndRanks) {
  for (const Choice<ComputeMode>& mode : kComputeModes) {
    const std::string flag = Str("--compute ", mode.word);
    SCOPED_TRACE(flag);
    const std::vector<int> expected = AnswerInProcess(flag);
    EXPECT_EQ(expected.size(), 40u);
    EXPECT_EQ(AnswerInProcess(flag + " --pipeline-parallel 2"), expected);
    EXPECT_EQ(AnswerInProcess(flag + " --tensor-parallel 2").size(), 40u);
  }
}

TEST(ParallelBinary, RanksShareOneProcess) {
  Server server("--tensor-parallel 2 --compute exact");
  EXPECT_TRUE(server.workers().empty());
  EXPECT_THAT(server.Info().backend(), HasSubstr("2 ranks of cpu"));
  std::vector<int> answer;
  EXPECT_TRUE(server.Ask(40, &answer).ok());
  EXPECT_EQ(answer.size(), 40u);
  std::vector<int> again;
  EXPECT_TRUE(server.Ask(40, &again).ok());
  EXPECT_EQ(again, answer);
}

TEST(ParallelBinary, AWorkerThatDiesIsReplaced) {
  Server server("--pipeline-parallel 2");
  ASSERT_EQ(server.workers().size(), 2u);
  for (const int victim : {1, 0}) {
    const std::vector<int> workers = ChildrenOf(server.pid());
    ASSERT_EQ(workers.size(), 2u);
    server.ExpectUndisturbed([&] { kill(workers[static_cast<size_t>(victim)], SIGKILL); });
  }
  const std::vector<int> workers = ChildrenOf(server.pid());
  EXPECT_EQ(server.Stop(), 0);
  EXPECT_THAT(server.output(), HasSubstr("was killed by signal 9; it is started again"));
  for (const int worker : workers) EXPECT_TRUE(Goes(worker));
}

// What takes a lost worker's place opens the model's files again. Tokens of another model never
// follow; the error names the file.
TEST(ParallelBinary, AWorkerThatFindsAnotherModelComputesNothing) {
  const TestFolder folder;
  const std::string path = WriteTinyLlamaFolder(folder.Folder("model"), SlowModel()).value();
  const std::string config = path + "/config.json", weights = path + "/model.safetensors";
  const std::string text = WithRopeTheta(ReadWhole(config), "10000.0");
  const std::string rope = WithRopeTheta(ReadWhole(config), "40000.0"), bytes = ReadWhole(weights);
  std::string others = bytes;
  for (size_t i = bytes.size() / 2; i < bytes.size(); ++i)
    others[i] = static_cast<char>(others[i] ^ 1);
  const struct {
    const std::string& file;
    const std::string& before;
    const std::string& after;
    FileEvent event;
  } kChanges[] = {{config, text, rope, FileEvent::kWrittenInPlace},
                  {weights, bytes, others, FileEvent::kCopiedWithItsTimes}};
  for (const auto& [file, before, after, event] : kChanges) {
    SCOPED_TRACE(Str(file, ", event ", static_cast<int>(event)));
    ChangeFile(file, FileEvent::kRenamedOver, before);
    ServedBinary server(Str(ServedBinary::kGrpcOnly, "--threads 2 --weights q4_0 --model ", path,
                            " --pipeline-parallel 2"));
    const auto ask = [&](const std::function<void()>& disturb, std::vector<int>& answer) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + kPatience);
      const auto reader = server.stub().GenerateStream(&context, GreedyRequest(kLongAnswer));
      for (v1::GenerateResponse message; reader->Read(&message);) {
        const auto& ids = message.output().token_ids();
        answer.insert(answer.end(), ids.begin(), ids.end());
        if (disturb && answer.size() < 100) disturb();
      }
      return reader->Finish();
    };
    std::vector<int> expected, answer;
    ASSERT_TRUE(ask({}, expected).ok());
    bool changed = false;
    const grpc::Status status = ask(
        [&] {
          if (std::exchange(changed, true)) return;
          ChangeFile(file, event, after);
          kill(ChildrenOf(server.pid())[1], SIGKILL);
        },
        answer);
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(status.error_message(), HasSubstr(file));
    ASSERT_LE(answer.size(), expected.size());
    EXPECT_TRUE(std::equal(answer.begin(), answer.end(), expected.begin()));
    std::vector<int> next;
    EXPECT_FALSE(ask({}, next).ok());
    EXPECT_TRUE(next.empty());
  }
}

TEST(ParallelBinary, AWorkerThatHangsIsReplaced) {
  Server server("--pipeline-parallel 2");
  ASSERT_EQ(server.workers().size(), 2u);
  const int victim = server.workers()[1];
  server.ExpectUndisturbed([&] { kill(victim, SIGSTOP); });
  EXPECT_EQ(server.Stop(), 0);
  EXPECT_TRUE(Goes(victim)) << server.output();
}

// Requests of every kind, in the prompt, while decoding and while another loss is being recovered
// from. TREADLE_KILLS: how many workers are lost, in every way there is.
TEST(ParallelBinary, WorkersThatDieAtAnyTimeChangeNoAnswer) {
  const char* const asked = std::getenv("TREADLE_KILLS");
  const int kills = asked == nullptr ? 12 : std::atoi(asked);
  Server server("--pipeline-parallel 3 --max-batch-tokens 48 --kv-dtype int8");
  std::vector<Said> undisturbed(kRequestKinds);
  for (int kind = 0; kind < kRequestKinds; ++kind) {
    const grpc::Status status = server.Ask(RequestOfKind(kind), undisturbed[kind]);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  std::atomic<bool> done = false;
  std::atomic<int> next = 0, answers = 0, messages = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([&] {
      while (!done) {
        const int kind = next++ % kRequestKinds;
        Said said;
        const grpc::Status status = server.Ask(RequestOfKind(kind), said, &messages);
        EXPECT_TRUE(status.ok()) << kind << ": " << status.error_message();
        EXPECT_TRUE(said == undisturbed[kind]) << kind;
        ++answers;
      }
    });
  }
  std::mt19937 random(1);
  std::array<int, std::size(kProcessLosses)> happened = {};
  for (int killed = 0; killed < kills;) {
    // Two of three come once streams have gone on after the last one.
    const int heard = messages;
    const bool patient = random() % 3 != 0;
    for (int wait = 0; patient && messages < heard + 20 && wait < 6000; ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 300));
    const std::vector<int> workers = ChildrenOf(server.pid());
    if (workers.empty()) continue;
    const size_t loss = random() % std::size(kProcessLosses);
    kProcessLosses[loss].happen(workers[random() % workers.size()]);
    ++happened[loss];
    ++killed;
  }
  done = true;
  for (std::thread& client : clients) client.join();
  EXPECT_GT(answers, 0);
  for (size_t loss = 0; loss < happened.size(); ++loss) {
    std::cout << happened[loss] << " workers " << kProcessLosses[loss].name << "\n";
  }
  std::cout << "beside " << answers << " answers\n";
  EXPECT_EQ(server.Stop(), 0);
}

// A crashed worker leaves its successor an empty memory. The successor is lost in an epoch that
// never stands, and leaves that memory to the next one.
TEST(ParallelBinary, AnEmptyMemoryIsNeverTakenForAFullOne) {
  for (const int crash : {SIGABRT, SIGSEGV}) {
    Server server("--pipeline-parallel 2");
    ASSERT_EQ(server.workers().size(), 2u);
    const int stopped = server.workers()[0], crashed = server.workers()[1];
    server.ExpectUndisturbed([&] {
      kill(stopped, SIGSTOP);
      kill(crashed, crash);
      int successor = crashed;
      for (int wait = 0; successor == crashed && wait < 6000; ++wait) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        for (const int worker : ChildrenOf(server.pid())) {
          if (worker != stopped && worker != crashed) successor = worker;
        }
      }
      ASSERT_NE(successor, crashed);
      std::this_thread::sleep_for(std::chrono::milliseconds(900));
      kill(successor, SIGKILL);
      kill(stopped, SIGCONT);
    });
  }
}

TEST(ParallelBinary, OrWhatRanEnds) {
  Server server("--pipeline-parallel 2 --on-worker-loss restart");
  ASSERT_EQ(server.workers().size(), 2u);
  const grpc::Status lost = server.AskAndDisturb([&] { kill(server.workers()[1], SIGKILL); });
  EXPECT_EQ(lost.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(lost.error_message(), HasSubstr("treadle-")) << "names the worker's address";
  const grpc::Status back = server.Ask(40);
  EXPECT_TRUE(back.ok()) << back.error_message();
}

TEST(ParallelBinary, OrTheServerEnds) {
  Server server("--pipeline-parallel 2 --on-worker-loss fail");
  ASSERT_EQ(server.workers().size(), 2u);
  const grpc::Status lost = server.AskAndDisturb([&] { kill(server.workers()[0], SIGKILL); });
  EXPECT_EQ(lost.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(server.Wait(), 1);
  EXPECT_THAT(server.output(), HasSubstr("treadle serve: the engine failed: "));
  for (const int worker : server.workers()) EXPECT_TRUE(Goes(worker));
}

TEST(ParallelBinary, WorkersDoNotOutliveAServerThatIsKilled) {
  Server server("--pipeline-parallel 2");
  ASSERT_EQ(server.workers().size(), 2u);
  const grpc::Status lost = server.AskAndDisturb([&] {
    kill(server.workers()[1], SIGSTOP);
    server.Signal(SIGKILL);
  });
  EXPECT_EQ(lost.error_code(), grpc::StatusCode::UNAVAILABLE) << lost.error_message();
  for (const int worker : server.workers()) EXPECT_TRUE(Goes(worker));
}

TEST(ParallelBinary, WorkersStartedByHandServeOneServerAfterTheOther) {
  const std::vector<int> expected = AnswerInProcess("");
  WorkerBinary first("", {"--model", Model()});
  WorkerBinary second("");  // gets its weights from the master
  ASSERT_NE(first.address(), "") << first.output();
  ASSERT_NE(second.address(), "") << second.output();
  for (int i = 0; i < 2; ++i) {
    Server server(Str("--weights-from master --workers ", first.address(), ",", second.address()));
    EXPECT_TRUE(server.workers().empty());
    std::vector<int> answer;
    const grpc::Status status = server.Ask(40, &answer);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(answer, expected);
    EXPECT_EQ(server.Stop(), 0) << server.output();
  }
  for (WorkerBinary* worker : {&first, &second}) {
    EXPECT_EQ(worker->Stop(), 0) << worker->output();
  }
}

TEST(ParallelBinary, AWorkerThatComesBackIsUsedAgain) {
  const std::string model = "--model " + Model();
  auto second = std::make_unique<WorkerBinary>(model);
  WorkerBinary first("", {"--model", Model()});
  const std::string address = second->address();
  Server server(Str("--workers ", first.address(), ",", address));
  server.ExpectUndisturbed([&] {
    second.reset();  // SIGKILL
    second = std::make_unique<WorkerBinary>(model, std::vector<std::string>{}, address);
    EXPECT_EQ(second->address(), address) << second->output();
  });
}

TEST(ParallelBinary, AWorkerThatIsAskedLeavesItsStageToASpare) {
  const std::string secret = OwnFolder().Write("secret", "sixteen letters at least\n");
  const std::string known = "--control-secret-file " + secret;
  WorkerBinary first(known, {"--model", Model()}), second(known, {"--model", Model()}),
      spare(known, {"--model", Model()});
  Server server(Str("--spares 1 --workers ", first.address(), ",", second.address(), ",",
                    spare.address(), " ", known));
  const std::string drain = "drain-worker " + second.address() + " ";
  EXPECT_THAT(RunToEnd(Treadle(drain), 1), HasSubstr("wants proof of its control secret"));
  server.ExpectUndisturbed([&] {
    EXPECT_THAT(RunToEnd(Treadle(drain + known)), HasSubstr("leaves its stage"));
    EXPECT_EQ(second.Wait(), 0) << second.output();
  });
  EXPECT_NE(spare.WaitForLine("a master attached"), "") << "it did not take the stage";
}

TEST(ParallelBinary, WhatCannotBeIsSaidBeforeAnythingIsLoaded) {
  const std::pair<const char*, const char*> cases[] = {
      {"--tensor-parallel 3", "4 attention heads cannot be divided by 3; 2 or 4 would work"},
      {"--pipeline-parallel 5", "--pipeline-parallel is 5, expected at most 4"},
      {"--pipeline-parallel 3 --workers a:1,b:1", "but --workers has 2"},
      {"--wire int8", "with one stage nothing is sent"},
      {"--plan-forwarding late", "with one stage nothing is passed on"},
      {"--plan-forwarding never", "expected early or late"},
      {"--weights-from master", "there are no workers"},
      {"--pipeline-parallel 2 --device cpu --kv-dtype bf16",
       "expected f16, f32 or int8 on the CPU"},
  };
  const std::string serve = Str(ServedBinary::kGrpcOnly, "--model ", Model(), " ");
  for (const auto& [flags, message] : cases) {
    const std::string said = RunToEnd(ServedBinary::Command(serve + flags), 2);
    EXPECT_THAT(said, HasSubstr(message));
    EXPECT_THAT(said, testing::Not(HasSubstr("loading")));
  }
}

// Whether this machine has GPUs or not.
TEST(ParallelBinary, WorkersKeepToTheDeviceThatTheyWereGiven) {
  WorkerBinary worker("--device cpu", {"--model", Model()});
  ChildProcess server(ServedBinary::Command(Flags("--device cuda --workers " + worker.address())));
  EXPECT_NE(server.Wait(), 0);
  EXPECT_THAT(server.output(), HasSubstr("runs on cpu, this master wants cuda"));
}

TEST(ParallelBinary, AForeignWorkerIsRefused) {
  TinyModelOptions other;
  other.layers = 4;
  other.seed = 2;
  ASSERT_OK_AND_ASSIGN(const auto written, WriteTinyGpt2Gguf(OwnFolder().path(), other));
  WorkerBinary first("", {"--model", Model()});
  WorkerBinary second("", {"--model", written});
  ChildProcess server(
      ServedBinary::Command(Flags(Str("--workers ", first.address(), ",", second.address()))));
  EXPECT_EQ(server.Wait(), 1);
  EXPECT_THAT(server.output(), HasSubstr(second.address()));
}

}  // namespace
}  // namespace treadle
