// The treadle binary over workers on hosts of their own (network namespaces, where this machine
// allows them): what users see when a host is cut off, and when it is there again.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/status.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/child_process.h"
#include "tests/server/cli/network_namespaces.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using testing::HasSubstr;

const char kBinary[] = TREADLE_BINARY;
constexpr int kAnswer = 40;
constexpr int kLongAnswer = 3000;
constexpr auto kPatience = std::chrono::minutes(2);

// For this process alone, removed at the end.
class OwnModel {
 public:
  OwnModel() : folder_(testing::TempDir() + Str("/namespaces-", getpid())) {
    std::filesystem::create_directories(folder_);
    TinyModelOptions options;
    options.layers = 4;
    options.hidden = 128;
    options.ffn_hidden = 256;
    options.context = 4096;
    const auto written = WriteTinyLlamaGguf(folder_, options);
    TREADLE_CHECK(written.ok());
    path_ = *written;
  }
  ~OwnModel() { std::filesystem::remove_all(folder_); }
  const std::string& path() const { return path_; }

 private:
  const std::string folder_;
  std::string path_;
};

v1::GenerateRequest Request(int tokens) {
  v1::GenerateRequest request;
  request.set_text("Once upon a time");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_new_tokens(tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

// An answer that comes bit by bit.
class Answer {
 public:
  Answer(v1::Inference::Stub& stub, int tokens) {
    context_.set_deadline(std::chrono::system_clock::now() + kPatience);
    reader_ = stub.GenerateStream(&context_, Request(tokens));
  }
  bool Read() {
    v1::GenerateResponse message;
    if (!reader_->Read(&message)) return false;
    const auto& ids = message.output().token_ids();
    tokens_.insert(tokens_.end(), ids.begin(), ids.end());
    return true;
  }
  grpc::Status Finish() {
    while (Read()) {
    }
    return reader_->Finish();
  }
  const std::vector<int>& tokens() const { return tokens_; }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;
  std::vector<int> tokens_;
};

std::vector<int> AnswerInProcess(const std::string& model) {
  ChildProcess child({kBinary, "generate", "--model", model, "--prompt", "Once upon a time",
                      "--max-new-tokens", Str(kAnswer), "--ignore-eos", "--json", "--threads",
                      "1"});
  if (child.Wait() != 0) return {};
  const std::string& output = child.output();
  return nlohmann::json::parse(
      output.substr(output.find('{'), output.rfind('}') + 1 - output.find('{')))["token_ids"];
}

class NamespaceBinary : public testing::Test {
 protected:
  static constexpr int kHosts = 2;

  void SetUp() override {
    auto network = NetworkOfHosts::Create(kHosts);
    if (!network.ok()) {
      GTEST_SKIP() << "workers on hosts of their own are not tested on this machine: "
                   << network.status().message();
    }
    network_ = std::make_unique<NetworkOfHosts>(*std::move(network));
    network_->hub().Enter();  // so that server and client are there
  }

  // Workers that other machines reach want one.
  static std::string SecretFile() {
    const std::string path = Str(testing::TempDir(), "/control-secret-", getpid());
    std::ofstream(path) << "a secret of sixteen\n";
    return path;
  }
  static std::string Worker(int host) { return NetworkOfHosts::Address(host) + ":7001"; }
  void StartWorkers() {
    for (int host = 0; host < kHosts; ++host) {
      network_->host(host).Run([&] {
        workers_.push_back(std::make_unique<ChildProcess>(std::vector<std::string>{
            kBinary, "worker", "--model", model_.path(), "--listen", Worker(host),
            "--control-secret-file", SecretFile(), "--data-interface",
            host == 0 ? "eth0" : NetworkOfHosts::Address(host), "--threads", "1"}));
      });
      ASSERT_NE(workers_.back()->WaitForLine("listening on "), "") << workers_.back()->output();
    }
  }
  void StartServer() {
    server_ = std::make_unique<ChildProcess>(std::vector<std::string>{kBinary,
                                                                      "serve",
                                                                      "--model",
                                                                      model_.path(),
                                                                      "--listen",
                                                                      "127.0.0.1:0",
                                                                      "--http-listen",
                                                                      "none",
                                                                      "--metrics-listen",
                                                                      "none",
                                                                      "--threads",
                                                                      "2",
                                                                      "--pin-threads",
                                                                      "off",
                                                                      "--workers",
                                                                      Worker(0) + "," + Worker(1),
                                                                      "--iteration-deadline",
                                                                      "2s",
                                                                      "--control-secret-file",
                                                                      SecretFile()});
    const std::string line = server_->WaitForLine("listening on 127.0.0.1:");
    ASSERT_NE(line, "") << server_->output();
    const size_t begin = line.find("127.0.0.1:");
    const std::string address = line.substr(begin, line.find(' ', begin) - begin);
    stub_ =
        v1::Inference::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  }
  // As a user who tries again for a while.
  std::vector<int> AskUntilAnswered() {
    grpc::Status status;
    const auto end = std::chrono::steady_clock::now() + kPatience;
    do {
      Answer answer(*stub_, kAnswer);
      status = answer.Finish();
      if (status.ok()) return answer.tokens();
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    } while (std::chrono::steady_clock::now() < end);
    ADD_FAILURE() << status.error_message() << "\n" << server_->output();
    return {};
  }

  const OwnModel model_;
  std::unique_ptr<NetworkOfHosts> network_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;
  std::unique_ptr<ChildProcess> server_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

TEST_F(NamespaceBinary, AHostThatIsCutOffIsNamedAndUsedAgainOnceItIsBack) {
  const std::vector<int> expected = AnswerInProcess(model_.path());
  ASSERT_EQ(expected.size(), static_cast<size_t>(kAnswer));
  ASSERT_NO_FATAL_FAILURE(StartWorkers());
  ASSERT_NO_FATAL_FAILURE(StartServer());
  EXPECT_EQ(AskUntilAnswered(), expected);
  for (const int victim : {1, 0}) {
    SCOPED_TRACE(Str("host ", victim));
    Answer first(*stub_, kLongAnswer);
    Answer second(*stub_, kLongAnswer);
    ASSERT_TRUE(first.Read() && second.Read());
    ASSERT_EQ(network_->SetLink(victim, false), absl::OkStatus());
    for (Answer* answer : {&first, &second}) {
      const grpc::Status lost = answer->Finish();
      EXPECT_EQ(lost.error_code(), grpc::StatusCode::UNAVAILABLE) << lost.error_message();
      EXPECT_THAT(lost.error_message(), HasSubstr(Worker(victim)));
    }
    ASSERT_EQ(network_->SetLink(victim, true), absl::OkStatus());
    EXPECT_EQ(AskUntilAnswered(), expected);
  }
}

}  // namespace
}  // namespace treadle
