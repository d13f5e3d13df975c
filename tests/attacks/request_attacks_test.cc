// Requests that cost much: they must not stop the others, nor the probes, nor grow without bound.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "base/status.h"
#include "tests/attacks/attacked_server.h"
#include "tests/server/test_server.h"
#include "tests/server/without_xgrammar.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using testing::HasSubstr;

constexpr size_t kMax = (4 << 20) - 1024;  // of a text, with the message around it
constexpr int64_t kOverRestMb = 256;

// Clients that do one thing again and again.
class Crowd {
 public:
  Crowd(AttackedServer& server, int size, const std::function<void(v1::Inference::Stub&)>& attack) {
    for (int i = 0; i < size; ++i) {
      threads_.emplace_back([this, attack, channel = server.Connect()] {
        const auto stub = v1::Inference::NewStub(channel);
        while (!over_) attack(*stub);
      });
    }
  }
  ~Crowd() {
    over_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> over_ = false;
  std::vector<std::thread> threads_;
};

grpc::Status Tokenize(v1::Inference::Stub& stub, const std::string& text) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  v1::TokenizeRequest request;
  request.set_text(text);
  v1::TokenizeResponse response;
  return stub.Tokenize(&context, request, &response);
}

grpc::Status Chat(v1::Inference::Stub& stub, int messages, const std::string& role,
                  const std::string& content) {
  grpc::ClientContext context;
  v1::GenerateRequest request;
  for (int i = 0; i < messages; ++i) {
    auto* message = request.mutable_chat()->add_messages();
    message->set_role(role);
    message->set_content(content);
  }
  v1::GenerateResponse response;
  return stub.Generate(&context, request, &response);
}

class RequestAttacks : public testing::Test {
 protected:
  RequestAttacks() : server_({}, {.memory_mb = 2000}) {
    EXPECT_TRUE(server_.Honest().ok());
    memory_ = server_.memory_mb();
    stub_ = v1::Inference::NewStub(server_.Connect());
  }
  void TearDown() override {
    EXPECT_TRUE(server_.alive());
    EXPECT_TRUE(server_.Honest().ok());
    EXPECT_LT(server_.memory_mb(), memory_ + kOverRestMb);
  }

  AttackedServer server_;
  int64_t memory_ = 0;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

TEST_F(RequestAttacks, LongTextsDoNotHoldUpShortOnes) {
  const std::string spaces(kMax, ' ');
  const Crowd crowd(server_, 4, [&](v1::Inference::Stub& stub) { Tokenize(stub, spaces); });
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(server_.Honest().ok());
    EXPECT_TRUE(server_.Live());
    EXPECT_LT(server_.memory_mb(), memory_ + kOverRestMb);
  }
}

TEST_F(RequestAttacks, ManyMessagesAreRefused) {
  const grpc::Status status = Chat(*stub_, 300'000, "user", "");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "chat.messages has 300000 entries, expected at most 4096");
}

// Two million elements in a message of four megabytes, from eight clients at once. What is counted
// before it is parsed costs no more than its bytes.
TEST_F(RequestAttacks, MillionsOfEmptyElementsTakeNoMemory) {
  const auto field = [](char tag, const std::string& bytes) {
    std::string length;
    for (size_t left = bytes.size(); left > 0 || length.empty(); left >>= 7) {
      length.push_back(static_cast<char>((left & 127) | (left > 127 ? 128 : 0)));
    }
    return tag + length + bytes;
  };
  const auto many = [](const std::string& element) {
    std::string all;
    while (all.size() + element.size() < kMax) all += element;
    return all;
  };
  const std::string empty("\x0a\0", 2);  // field 1, no bytes
  const struct {
    const char* method;
    std::string message;
    const char* error;
  } rows[] = {
      {"/treadle.v1.Inference/Generate", field('\x22', many(empty)),
       "chat.messages has 2096639 entries, expected at most 4096"},
      {"/treadle.v1.Inference/Generate", field('\x2a', many({"\x4a\0", 2})),
       "sampling.logit_bias has 2096639 entries, expected at most 1024"},
      {"/treadle.v1.Inference/Generate", field('\x32', many({"\x1a\0", 2})),
       "stopping.stop_strings has 2096639 entries, expected at most 16"},
      {"/treadle.v1.Inference/Generate", field('\x1a', field('\x0a', many({"\0", 1}))),
       "prompt has 4193279 tokens, expected at most"},
      {"/treadle.v1.Inference/Generate", many({"\x7a\0", 2}), "fields that are not known"},
      {"/vllm.grpc.engine.VllmEngine/Generate", field('\x22', many({"\x52\0", 2})),
       "sampling_params.stop has 2096639 entries, expected at most 16"},
      {"/vllm.grpc.engine.VllmEngine/Abort", many({"\x0a\0", 2}), "expected at most 524288"},
      {"/treadle.v1.Inference/GetLoad", many({"\x78\0", 2}), "expected at most 524288"},
      {"/treadle.v1.Inference/WatchLedger", many({"\x78\0", 2}), "expected at most 524288"},
      {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", many({"\x78\0", 2}),
       "expected at most 524288"},
  };
  for (const auto& [method, message, error] : rows) {
    SCOPED_TRACE(error);
    std::vector<std::thread> clients;
    for (int i = 0; i < 8; ++i) {
      clients.emplace_back([&, channel = server_.Connect()] {
        std::string response;
        grpc::Status status;
        do {
          status = RawCall(channel, method, message, response);
        } while (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED);
        EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
        EXPECT_THAT(status.error_message(), HasSubstr(error));
      });
    }
    for (std::thread& client : clients) client.join();
    EXPECT_LT(server_.peak_memory_mb(), memory_ + 128);
    // The allocator may keep what the messages themselves took, 32 MB.
    EXPECT_LT(server_.memory_mb(), memory_ + memory_ / 5 + 40);
  }
}

TEST_F(RequestAttacks, ErrorsAreShort) {
  const grpc::Status role = Chat(*stub_, 1, std::string(16 << 10, 'r'), "hi");
  EXPECT_EQ(role.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(role.error_message(), HasSubstr("expected system, user, assistant or tool"));
  EXPECT_LT(role.error_message().size(), 1100u);
  // Whatever a text quotes: cut before a character, and it arrives.
  const grpc::Status id = Chat(*stub_, 1, "\x1b[31m\n\"", "hi");
  EXPECT_THAT(id.error_message(), HasSubstr("'\\x1b[31m\\x0a\"'"));
}

TEST_F(RequestAttacks, DetokenizeDoesNotAnswerMoreThanItTakes) {
  int32_t longest = 0;
  size_t most = 0;
  for (int32_t id = 0; id < 300; ++id) {
    grpc::ClientContext context;
    v1::DetokenizeRequest request;
    request.mutable_token_ids()->add_ids(id);
    v1::DetokenizeResponse response;
    if (stub_->Detokenize(&context, request, &response).ok() && response.text().size() > most) {
      most = response.text().size();
      longest = id;
    }
  }
  grpc::ClientContext context;
  v1::DetokenizeRequest request;
  request.mutable_token_ids()->mutable_ids()->Resize(1'000'000, longest);
  v1::DetokenizeResponse response;
  const grpc::Status status = stub_->Detokenize(&context, request, &response);
  EXPECT_GT(most, 4u);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("--max-request-bytes"));
}

// A grammar that costs little for as long as a trial looks at it, and then more with every token.
TEST(ConstraintAttacks, AConstraintThatTakesForEverHoldsUpItsOwnRequest) {
  TinyModelOptions options;
  options.context = 8192;
  const TestFolder folder;
  const auto model = WriteTinyLlamaGguf(folder.path(), options);
  ASSERT_TRUE(model.ok());
  AttackedServer server({}, {.memory_mb = 2000}, *model);
  ASSERT_TRUE(server.Honest().ok());

  std::atomic<bool> over = false;
  grpc::Status attacked;
  std::thread attack([&] {
    v1::GenerateRequest request;
    request.mutable_token_ids()->add_ids(1);
    request.mutable_constraint()->set_grammar("root ::= \"" + std::string(3400, 'x') +
                                              "\" s\ns ::= s s s | s s | \"a\" | \"\"");
    request.mutable_stopping()->set_max_new_tokens(8000);
    auto& bias = *request.mutable_sampling()->add_logit_bias();
    bias.set_token_id('a');  // bytes are the first tokens
    bias.set_bias(100);
    grpc::ClientContext context;
    const auto reader = v1::Inference::NewStub(server.Connect())->GenerateStream(&context, request);
    for (v1::GenerateResponse message; reader->Read(&message);) {
    }
    attacked = reader->Finish();
    over = true;
  });
  const auto honest = v1::Inference::NewStub(server.Connect());
  int answers = 0;
  do {
    v1::GenerateRequest request;
    request.mutable_token_ids()->add_ids(2);
    request.mutable_stopping()->set_max_new_tokens(200);
    request.mutable_stopping()->set_ignore_eos(true);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    v1::GenerateResponse response;
    const grpc::Status status = honest->Generate(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    ++answers;
  } while (!over && !HasFailure());
  attack.join();
  EXPECT_GT(answers, 1);
  EXPECT_EQ(attacked.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(attacked.error_message(), HasSubstr("the constraint is too expensive"));
}

TEST_F(RequestAttacks, WhoDoesNotWaitDoesNotCost) {
  const std::string spaces(kMax, ' ');
  const Crowd crowd(server_, 8, [&](v1::Inference::Stub& stub) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(20));
    v1::GenerateRequest request;
    request.set_text(spaces);
    v1::GenerateResponse response;
    EXPECT_FALSE(stub.Generate(&context, request, &response).ok());
  });
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(server_.Honest().ok());
}

// A grammar whose rules double what they repeat, unlike any other of its number, and which reads
// the same text in very many ways.
std::string DoublingGrammar(int number) {
  std::string grammar = Str("root ::= \"", number, "\" r14\nr0 ::= \"a\"? [^z]*\n");
  for (int i = 1; i <= 14; ++i) grammar += Str("r", i, " ::= r", i - 1, " r", i - 1, "\n");
  return grammar;
}

// Twenty-four clients of one key, each with one constraint after the other that costs seconds of a
// processor to try: other keys' constraints have their turns, and texts wait for no constraint.
TEST(SharingAttacks, ConstraintsOfOneKeyDoNotHoldUpOthers) {
  const std::string keys = testing::TempDir() + Str("sharing-keys-", getpid());
  std::ofstream(keys) << "hostile-0123456789abcdef hostile\nhonest-0123456789abcdef honest\n";
  AttackedServer server({"--api-keys-file", keys}, {});
  const auto ask = [](v1::Inference::Stub& stub, const std::string& key,
                      std::chrono::seconds patience, const v1::GenerateRequest& request) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer " + key + "-0123456789abcdef");
    context.set_deadline(std::chrono::system_clock::now() + patience);
    v1::GenerateResponse response;
    return stub.Generate(&context, request, &response);
  };
  const auto stub = v1::Inference::NewStub(server.Connect());
  v1::GenerateRequest first;
  first.set_text("Once");
  first.mutable_constraint()->set_json_object(true);
  if (IsWithoutXGrammar(ask(*stub, "honest", std::chrono::minutes(1), first).error_message())) {
    GTEST_SKIP() << kWithoutXGrammar;
  }
  std::atomic<int> number = 0;
  const Crowd crowd(server, 24, [&](v1::Inference::Stub& stub) {
    v1::GenerateRequest request;
    request.set_text("a");
    request.mutable_constraint()->set_grammar(DoublingGrammar(++number));
    ask(stub, "hostile", std::chrono::minutes(5), request);
  });
  while (number < 24) std::this_thread::yield();
  for (int i = 0; i < 3; ++i) {
    v1::GenerateRequest request;
    request.mutable_stopping()->set_max_new_tokens(4);
    request.set_text("Once");
    request.mutable_constraint()->set_json_schema(Str(R"({"type":"string","maxLength":)", i, "}"));
    const grpc::Status schema = ask(*stub, "honest", std::chrono::minutes(1), request);
    EXPECT_TRUE(schema.ok()) << schema.error_message();
    // Longer than the context, which is known once it was tokenized.
    request.clear_constraint();
    request.set_text(std::string(40'000, 'a'));
    const grpc::Status text = ask(*stub, "honest", std::chrono::minutes(1), request);
    EXPECT_THAT(text.error_message(), HasSubstr("tokens, expected at most"));
  }
  EXPECT_TRUE(server.alive());
  server.process().Signal(SIGKILL);  // nobody waits for what the crowd has asked
}

}  // namespace
}  // namespace treadle
