// build/treadle as tests use it: commands of words, a server and a worker that have said where they
// listen, and a folder and a model of this test process alone. Not thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/child_process.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {

// A tiny model in OwnFolder(), written at the first call, whose options count.
inline const std::string& OwnModel(const TinyModelOptions& options = {}) {
  static const std::string path = *WriteTinyLlamaGguf(OwnFolder().path(), options);
  return path;
}

// Big enough that an answer is under way for a while.
inline TinyModelOptions SlowModel() {
  TinyModelOptions options;
  options.layers = 4;
  options.hidden = 128;
  options.ffn_hidden = 256;
  options.context = 4096;
  return options;
}

// A command of build/treadle: the words between blanks, then `more`, each as it is.
inline std::vector<std::string> Treadle(const std::string& words,
                                        const std::vector<std::string>& more = {}) {
  std::vector<std::string> command = {TREADLE_BINARY};
  std::istringstream in(words);
  for (std::string word; in >> word;) command.push_back(word);
  command.insert(command.end(), more.begin(), more.end());
  return command;
}

// A request for exactly so many tokens, the most probable ones.
inline v1::GenerateRequest GreedyRequest(int tokens) {
  v1::GenerateRequest request;
  request.set_text("Once upon a time");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_new_tokens(tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

// `treadle serve`, once it has said where it listens. The test fails if it ends before.
class ServedBinary : public ChildProcess {
 public:
  static constexpr char kGrpcOnly[] = "--http-listen none --metrics-listen none ";
  // The command, for those that end before they listen. Every door that the words leave open takes
  // a free port of loopback: tests run beside each other.
  static std::vector<std::string> Command(const std::string& words,
                                          const std::vector<std::string>& more = {}) {
    std::string doors = "serve --listen 127.0.0.1:0 --pin-threads off ";
    for (const char* const door : {"--http-listen", "--metrics-listen"}) {
      if (words.find(door) == std::string::npos) doors += std::string(door) + " 127.0.0.1:0 ";
    }
    return Treadle(doors + words, more);
  }

  // With these flags.
  explicit ServedBinary(const std::string& words, const std::vector<std::string>& more = {})
      : ChildProcess(Command(words, more)), listens_(WaitForLine("gRPC")) {
    const std::string behind_http = WordAfter(listens_, "gRPC on ");
    address_ = behind_http.empty() ? WordAfter(listens_, "listening on ") : behind_http;
    if (address_.empty()) throw std::runtime_error("treadle serve has ended: " + output());
    stub_ = Connect();
  }

  const std::string& listens() const { return listens_; }  // the line
  const std::string& address() const { return address_; }  // gRPC's
  int http_port() const {
    const std::string port = WordAfter(listens_, "http://127.0.0.1:");
    return port.empty() ? 0 : std::stoi(port);
  }
  v1::Inference::Stub& stub() const { return *stub_; }
  // On a connection of its own.
  std::unique_ptr<v1::Inference::Stub> Connect() const {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return v1::Inference::NewStub(
        grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), own));
  }

 private:
  const std::string listens_;
  std::string address_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

// The answer to a request, which is expected to end well.
inline v1::GenerateResponse Generate(const ServedBinary& server,
                                     const v1::GenerateRequest& request) {
  grpc::ClientContext context;
  v1::GenerateResponse response;
  const grpc::Status status = server.stub().Generate(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

// `treadle worker`, once it has said where it listens, or has ended.
class WorkerBinary : public ChildProcess {
 public:
  explicit WorkerBinary(const std::string& words, const std::vector<std::string>& more = {},
                        const std::string& listen = "127.0.0.1:0")
      : ChildProcess(Treadle("worker --threads 1 --listen " + listen + " " + words, more)),
        address_(WordAfter(WaitForLine("listening on "), "listening on ")) {}
  const std::string& address() const { return address_; }  // "": it does not listen

 private:
  const std::string address_;
};

}  // namespace treadle
