// The treadle binary with --durable: killed at any time and started again, beside clients that
// resume their streams over gRPC and HTTP, and what users see where that cannot be.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <regex>
#include <system_error>
#include <thread>

#include "base/status.h"
#include "base/sync.h"
#include "models/architectures/architecture.h"
#include "server/durable/stored_frame.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/served_binary.h"
#include "tests/server/http/http_client.h"
#include "tests/support/assert_ok.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr auto kPatience = std::chrono::minutes(4);

class DurableBinary : public testing::Test {
 protected:
  void SetUp() override { WriteModel(/*seed=*/1); }
  void WriteModel(uint64_t seed) {
    TinyModelOptions options = SlowModel();
    options.seed = seed;
    ASSERT_OK_AND_ASSIGN(const auto written, WriteTinyLlamaGguf(root_.path(), options));
    model_ = written;
  }
  std::string Flags() const {
    return Str("--http-listen 127.0.0.1:0 --metrics-listen none --threads 2 --max-batch-tokens 48",
               " --model ", model_, " --durable ", root_ / "durable ");
  }

  const TestFolder root_;
  std::string model_;
};

// The one that runs now; clients find it again.
class Place {
 public:
  std::shared_ptr<ServedBinary> Get() {
    MutexLock lock(mutex_);
    return server_;
  }
  void Put(std::shared_ptr<ServedBinary> server) {
    MutexLock lock(mutex_);
    server_ = std::move(server);
  }

 private:
  Mutex mutex_;
  std::shared_ptr<ServedBinary> server_ ABSL_GUARDED_BY(mutex_);
};

constexpr int kKinds = 20;
v1::GenerateRequest Request(int kind) {
  v1::GenerateRequest made;
  for (int i = 0; i < 1 + kind * 173 % 300; ++i) {
    made.mutable_token_ids()->add_ids((kind * 31 + i * 7) % 256);
  }
  v1::Sampling& sampling = *made.mutable_sampling();
  sampling.set_temperature(kind % 3 == 0 ? 0.0f : 0.9f);
  sampling.set_seed(static_cast<uint64_t>(kind));
  if (kind % 4 == 1) sampling.set_num_candidates(3);
  if (kind % 5 == 2) sampling.set_repetition_penalty(1.3f);
  if (kind % 5 == 3) sampling.set_frequency_penalty(0.5f);
  made.mutable_stopping()->set_max_new_tokens(50 + kind * 97 % 400);
  made.mutable_stopping()->set_ignore_eos(kind % 2 == 0);
  if (kind % 7 == 5) made.mutable_stopping()->add_stop_strings("e");
  made.mutable_response()->set_logprobs(kind % 3);
  if (kind % 6 == 4) made.mutable_response()->set_prompt_logprobs(1);
  return made;
}

// A stream's answer by candidate: text, ids, log probabilities and how it ended.
struct Heard {
  std::map<int, std::string> said;
  int tokens = 0;
  int cached = 0;  // tokens of the prompt
};

void Hear(grpc::ClientReader<v1::GenerateResponse>& reader, Heard& heard,
          std::atomic<int>& messages) {
  for (v1::GenerateResponse message; reader.Read(&message); ++messages) {
    if (message.has_prompt_info()) {
      std::string& of_prompt = heard.said[-1];
      of_prompt.clear();
      for (const auto& about : message.prompt_info().prompt_logprobs()) {
        of_prompt += about.SerializeAsString();
      }
    }
    const v1::Output& output = message.output();
    std::string& of_candidate = heard.said[output.candidate()];
    for (const int id : output.token_ids()) of_candidate += Str(id, " ");
    of_candidate += output.text();
    for (const auto& about : output.logprobs()) of_candidate += about.SerializeAsString();
    if (output.has_finish_info()) of_candidate += output.finish_info().SerializeAsString();
    heard.tokens += output.token_ids_size();
    if (message.has_usage()) heard.cached = static_cast<int>(message.usage().cached_tokens());
  }
}

// As a client that does not give up. `resumed` counts.
Heard Ask(Place& place, int kind, const std::string& id, std::atomic<int>& messages,
          std::atomic<int>& resumed) {
  v1::GenerateRequest request = Request(kind);
  request.set_request_id(id);
  Heard heard;
  bool known = false;  // the server has it
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < end) {
    const std::shared_ptr<ServedBinary> server = place.Get();
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader;
    if (known) {
      v1::ResumeRequest resume;
      resume.set_request_id(id);
      resume.set_from_token(heard.tokens);
      reader = server->stub().Resume(&context, resume);
      ++resumed;
    } else {
      reader = server->stub().GenerateStream(&context, request);
    }
    Hear(*reader, heard, messages);
    const grpc::Status status = reader->Finish();
    if (status.ok()) return heard;
    if (heard.tokens > 0 || status.error_code() == grpc::StatusCode::ALREADY_EXISTS) known = true;
    if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
      EXPECT_EQ(heard.tokens, 0) << id << ": " << status.error_message();
      known = false;
    } else if (status.error_code() != grpc::StatusCode::ALREADY_EXISTS) {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ADD_FAILURE() << id << " did not end";
  return heard;
}

std::string HttpBody(int kind) {
  return Str(R"({"messages": [{"role": "user", "content": "question )", kind,
             R"("}], "max_tokens": )", 60 + 80 * kind, R"(, "seed": )", kind,
             R"(, "stream": true, "ignore_eos": true, "logprobs": true, "top_logprobs": 1,
                "stream_options": {"include_usage": true}})");
}

// The events of a stream whose client comes back with Last-Event-ID.
std::string AskHttp(Place& place, int kind, const std::string& id, std::atomic<int>& resumed) {
  const std::string body = HttpBody(kind);
  std::string events;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (events.find("[DONE]") == events.npos && std::chrono::steady_clock::now() < end) {
    const size_t last = events.rfind("id: ");
    std::string headers = Str("X-Request-Id: ", id, "\r\n");
    if (last != events.npos) {
      headers += Str("Last-Event-ID: ", events.substr(last + 4, events.find('\n', last) - last - 4),
                     "\r\n");
      ++resumed;
    }
    HttpClient client(place.Get()->http_port());
    client.Send(Str("POST /v1/chat/completions HTTP/1.0\r\n", headers,
                    "Content-Length: ", body.size(), "\r\n\r\n", body));
    const std::string head = client.ReadUntil("\r\n\r\n");
    const std::string all = client.ReadAll();
    if (head.find("409 ") != head.npos && events.empty()) {  // it was accepted, and nothing came
      events = Str("id: ", id, ":0\n");
    } else if (head.find("200 OK") != head.npos) {
      const size_t whole = all.rfind("\n\n");
      if (events.ends_with(":0\n")) events.clear();
      if (whole != all.npos) events += all.substr(0, whole + 2);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  // The time, and how an answer was computed, differ from run to run.
  static const std::regex varies(
      R"("created":[0-9]+|,"(prompt|completion)_tokens_details":\{[^}]*\})");
  return std::regex_replace(std::regex_replace(events, varies, ""), std::regex(id), "ID");
}

// Streams of every kind, cut in the prompt, while they decode, and while they are being resumed.
// TREADLE_KILLS: how often the server is killed.
TEST_F(DurableBinary, AServerThatIsKilledAtAnyTimeLosesNothing) {
  const char* const asked = std::getenv("TREADLE_KILLS");
  const int kills = asked == nullptr ? 8 : std::atoi(asked);
  Place place;
  place.Put(std::make_shared<ServedBinary>(Flags()));
  std::atomic<int> messages = 0, resumed = 0;
  std::vector<Heard> undisturbed;
  for (int kind = 0; kind < kKinds; ++kind) {
    undisturbed.push_back(Ask(place, kind, Str("undisturbed-", kind), messages, resumed));
  }
  constexpr int kHttpKinds = 3;
  std::vector<std::string> events;
  for (int kind = 0; kind < kHttpKinds; ++kind) {
    events.push_back(AskHttp(place, kind, Str("first-", kind), resumed));
    ASSERT_THAT(events.back(), HasSubstr("[DONE]"));
  }
  ASSERT_EQ(resumed, 0);

  std::atomic<bool> done = false;
  std::atomic<int> next = 0, answers = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back([&] {
      while (!done) {
        const int number = next++, kind = number % kKinds;
        const Heard heard = Ask(place, kind, Str("again-", number), messages, resumed);
        EXPECT_TRUE(heard.said == undisturbed[kind].said) << kind;
        EXPECT_EQ(heard.tokens, undisturbed[kind].tokens) << kind;
        ++answers;
      }
    });
  }
  clients.emplace_back([&] {
    for (int number = 0; !done; ++number) {
      const int kind = number % kHttpKinds;
      EXPECT_EQ(AskHttp(place, kind, Str("web-", number), resumed), events[kind]) << number;
    }
  });
  std::mt19937 random(7);
  for (int i = 0; i < kills; ++i) {
    const int heard = messages;
    const bool patient = random() % 3 != 0;
    for (int wait = 0; patient && messages < heard + 50 && wait < 6000; ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 200));
    const std::shared_ptr<ServedBinary> server = place.Get();
    server->Signal(SIGKILL);
    EXPECT_EQ(server->Wait(), 256 + SIGKILL);
    place.Put(std::make_shared<ServedBinary>(Flags()));
  }
  done = true;
  for (std::thread& client : clients) client.join();
  EXPECT_GT(answers, 0);
  EXPECT_GT(resumed, 0);
  std::printf("%d kills, %d answers, %d resumed\n", kills, answers.load(), resumed.load());
  EXPECT_EQ(place.Get()->Stop(), 0);
}

// Two prompts part where a state has been overwritten; a third request begins at the copy that was
// kept there, and is cut.
TEST_F(DurableBinary, AStateThatWasCopiedForABranchIsMadeAgain) {
  model_ = *WriteTinyGguf(*FindArchitecture("granitehybrid"), root_.path(), SlowModel());
  const auto prompt_of = [](int own, const std::string& id) {
    v1::GenerateRequest made;
    for (int i = 0; i < 360; ++i) made.mutable_token_ids()->add_ids(i < 300 ? i % 251 : own);
    made.set_request_id(Str(id, own));
    made.mutable_sampling()->set_seed(5);
    made.mutable_stopping()->set_max_new_tokens(300);
    made.mutable_stopping()->set_ignore_eos(true);
    made.mutable_response()->set_logprobs(2);
    return made;
  };
  std::atomic<int> messages = 0;
  Heard heard[2];
  for (const bool kill : {false, true}) {
    ServedBinary server(Flags());
    for (const int own : {1, 2, 3}) {
      Heard of_others;
      grpc::ClientContext context;
      const auto reader =
          server.stub().GenerateStream(&context, prompt_of(own, kill ? "cut-" : "whole-"));
      messages = 0;
      std::atomic<bool> over = false;
      std::thread killer([&] {
        while (messages < 20 && !over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (kill && own == 3) server.Signal(SIGKILL);
      });
      Hear(*reader, own == 3 ? heard[kill] : of_others, messages);
      over = true;
      killer.join();
      EXPECT_EQ(reader->Finish().ok(), !(kill && own == 3));
    }
    if (!kill) EXPECT_EQ(server.Stop(), 0);
  }
  EXPECT_EQ(heard[0].cached, 288);
  EXPECT_LT(heard[1].tokens, 300);
  ServedBinary server(Flags());
  v1::ResumeRequest resume;
  resume.set_request_id("cut-3");
  resume.set_from_token(heard[1].tokens);
  grpc::ClientContext context;
  const auto reader = server.stub().Resume(&context, resume);
  Hear(*reader, heard[1], messages);
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(heard[1].tokens, 300);
  EXPECT_TRUE(heard[1].said == heard[0].said);
  EXPECT_EQ(server.Stop(), 0);
}

// Events of a stored request, told again. Empty: it cannot be resumed.
Heard HearAgain(ServedBinary& server, const std::string& id) {
  v1::ResumeRequest resume;
  resume.set_request_id(id);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  Heard heard;
  std::atomic<int> messages = 0;
  const auto reader = server.stub().Resume(&context, resume);
  Hear(*reader, heard, messages);
  const grpc::Status status = reader->Finish();
  if (!status.ok()) return {};
  return heard;
}

TEST_F(DurableBinary, AFolderThatIsDeletedIsNoticedAndMadeAnew) {
  Place place;
  place.Put(std::make_shared<ServedBinary>(Flags()));
  std::atomic<int> messages = 0, resumed = 0;
  constexpr int kLong = 6, kShort = 0;
  const Heard whole = Ask(place, kLong, "undisturbed", messages, resumed);
  const Heard brief = Ask(place, kShort, "undisturbed-too", messages, resumed);
  for (int round = 0; round < 5; ++round) {
    const int before = messages;
    std::thread running([&] {
      EXPECT_TRUE(Ask(place, kLong, Str("running-", round), messages, resumed).said == whole.said);
    });
    while (messages < before + 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // The server may write a file while its folder is being deleted.
    for (std::error_code again(1, std::generic_category()); again;) {
      std::filesystem::remove_all(root_ / "durable", again);
    }
    // It is refused until the folder is there again, and nothing is told of it before.
    EXPECT_TRUE(Ask(place, kShort, Str("after-", round), messages, resumed).said == brief.said);
    running.join();
  }
  EXPECT_EQ(resumed, 0) << "what ran went on";
  const std::shared_ptr<ServedBinary> first = place.Get();
  first->Kill();
  EXPECT_THAT(first->output(), HasSubstr("while it was in use"));
  ServedBinary second(Flags());
  EXPECT_TRUE(HearAgain(second, "after-4").said == brief.said);
  for (const char* gone : {"running-4", "after-3", "undisturbed"}) {
    EXPECT_TRUE(HearAgain(second, gone).said.empty());
  }
  EXPECT_EQ(second.Stop(), 0);
  EXPECT_THAT(second.output(), Not(HasSubstr("damaged")));
}

// One bit of every answer is another one.
TEST_F(DurableBinary, WhatIsDamagedIsComputedAgain) {
  std::map<std::string, Heard> answers;
  {
    Place place;
    place.Put(std::make_shared<ServedBinary>(Flags()));
    std::atomic<int> messages = 0, resumed = 0;
    for (int kind = 0; kind < kKinds; ++kind) {
      answers[Str("kind-", kind)] = Ask(place, kind, Str("kind-", kind), messages, resumed);
    }
    place.Get()->Kill();
  }
  constexpr char kStored[] = "durable/requests-00000001.log";
  std::string bytes = root_.Read(kStored);
  const auto header = SegmentHeader::In(bytes);
  ASSERT_TRUE(header.ok() && *header);
  std::map<uint64_t, std::vector<size_t>> pieces;  // by request, where they begin
  const SegmentScan scan = ScanSegment((*header)->store, bytes, [&](size_t at, const Frame& frame) {
    if (frame.index >= kFirstPiece) pieces[frame.number].push_back(at + kFrameBytes);
  });
  EXPECT_EQ(scan.dropped, 0u);
  ASSERT_EQ(pieces.size(), answers.size());
  std::mt19937 random(3);
  bool named = false;
  for (const auto& [number, places] : pieces) {
    // Without its last piece an answer looks like one that had not ended: the log cannot name it.
    named = named || places.size() > 1;
    const size_t at = places[random() % std::max<size_t>(1, places.size() - 1)] + random() % 3;
    bytes[at] = static_cast<char>(bytes[at] ^ 1 << random() % 8);
  }
  root_.Write(kStored, bytes);
  ASSERT_TRUE(named) << "every answer is one piece";

  for (int start = 0; start < 2; ++start) {
    ServedBinary server(Flags());
    for (const auto& [id, heard] : answers) {
      EXPECT_TRUE(HearAgain(server, id).said == heard.said) << id;
    }
    EXPECT_EQ(server.Stop(), 0);  // it writes what it has
    EXPECT_THAT(server.output(), HasSubstr("stored requests are damaged"));
    const bool cut = server.output().find("computed again: '") != std::string::npos;
    // It is stored again then, but seldom, on a busy machine, is computed once more all the same.
    EXPECT_TRUE(cut || start > 0) << server.output();
  }
}

// A server goes on where bits are equal, however it is made up; another file of the same name and
// size is another model.
TEST_F(DurableBinary, OtherThreadsAndStagesGoOnAndAnotherModelDoesNot) {
  constexpr int kKind = 3;
  Heard whole;
  {
    Place place;
    place.Put(std::make_shared<ServedBinary>(Flags()));
    std::atomic<int> messages = 0, resumed = 0;
    whole = Ask(place, kKind, "whole", messages, resumed);
    v1::GenerateRequest request = Request(kKind);
    request.set_request_id("cut");
    grpc::ClientContext context;
    const auto reader = place.Get()->stub().GenerateStream(&context, request);
    v1::GenerateResponse message;
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(reader->Read(&message));
    place.Get()->Kill();
    while (reader->Read(&message)) {
    }
    reader->Finish();
  }
  {
    ServedBinary stages(Flags() + "--pipeline-parallel 2");
    EXPECT_TRUE(HearAgain(stages, "cut").said == whole.said);
    stages.Kill();
  }
  WriteModel(/*seed=*/2);
  ServedBinary other(Flags());
  grpc::ClientContext context;
  v1::ResumeRequest request;
  request.set_request_id("cut");
  const auto reader = other.stub().Resume(&context, request);
  v1::GenerateResponse message;
  EXPECT_FALSE(reader->Read(&message));
  const grpc::Status refused = reader->Finish();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(), HasSubstr("another model"));
}

TEST_F(DurableBinary, AFolderHasOneServer) {
  ServedBinary server(Flags());
  EXPECT_THAT(RunToEnd(ServedBinary::Command(Flags()), 1),
              HasSubstr("durable is in use by another process"));
}

TEST_F(DurableBinary, TheCommandResumes) {
  const auto generate = [](const ServedBinary& server, const std::string& words,
                           const std::vector<std::string>& more = {}, int code = 0) {
    return RunToEnd(Treadle(Str("generate --target ", server.address(), " ", words), more), code);
  };
  ServedBinary first(Flags());
  const std::string whole =
      generate(first, "--request-id story --max-new-tokens 30 --ignore-eos --json",
               {"--prompt", "Once upon a time"});
  first.Kill();
  ServedBinary second(Flags());
  EXPECT_EQ(generate(second, "--resume story --json"), whole);
  EXPECT_EQ(generate(second, "--resume story --from 30"), "\n");
  EXPECT_THAT(generate(second, "--resume other", {}, 2), HasSubstr("no request with the id"));
}

}  // namespace
}  // namespace treadle
