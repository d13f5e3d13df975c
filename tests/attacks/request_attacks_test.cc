// Requests that cost much: they must not stop the others, nor the probes, nor grow without bound.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "base/status.h"
#include "tests/attacks/attacked_server.h"

namespace treadle {
namespace {

using testing::HasSubstr;

constexpr size_t kLongest = (4 << 20) - 1024;  // of a text, with the message around it
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
  const std::string spaces(kLongest, ' ');
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

TEST_F(RequestAttacks, WhoDoesNotWaitDoesNotCost) {
  const std::string spaces(kLongest, ' ');
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

}  // namespace
}  // namespace treadle
