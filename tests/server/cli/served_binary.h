// build/treadle as tests use it: commands of words, a server that has said where it listens, and
// what belongs to this test process alone. Not thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/child_process.h"
#include "tests/support/tiny_model.h"

namespace treadle {

// A folder of this process's own, removed at its end.
inline const std::filesystem::path& OwnFolder() {
  struct Folder {
    std::filesystem::path path =
        std::filesystem::temp_directory_path() / Str("treadle-test-", getpid());
    Folder() { std::filesystem::create_directories(path); }
    ~Folder() { std::filesystem::remove_all(path); }
  };
  static const Folder folder;
  return folder.path;
}

// A tiny model there, written at the first call, whose options count.
inline const std::string& OwnModel(const TinyModelOptions& options = {}) {
  static const std::string path = *WriteTinyLlamaGguf(OwnFolder().string(), options);
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

// The word behind `text`; empty if that is not in the line.
inline std::string WordAfter(const std::string& line, const std::string& text) {
  const size_t at = line.find(text);
  if (at == std::string::npos) return "";
  const size_t begin = at + text.size();
  return line.substr(begin, line.find_first_of(" ,\n", begin) - begin);
}

// `treadle serve`, once it has said where it listens, or has ended.
class ServedBinary : public ChildProcess {
 public:
  static constexpr char kGrpcOnly[] = "--http-listen none --metrics-listen none ";

  // With these flags, and gRPC on a free port of loopback.
  explicit ServedBinary(const std::string& words, const std::vector<std::string>& more = {})
      : ChildProcess(Treadle("serve --listen 127.0.0.1:0 --pin-threads off " + words, more)),
        listens_(WaitForLine("listening on ")) {
    const std::string behind_http = WordAfter(listens_, "gRPC on ");
    address_ = behind_http.empty() ? WordAfter(listens_, "listening on ") : behind_http;
    if (serves()) stub_ = Connect();
  }

  bool serves() const { return !address_.empty(); }
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
  // Asks it to end; its exit code.
  int Stop() {
    Signal(SIGTERM);
    return Wait();
  }

 private:
  const std::string listens_;
  std::string address_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

#define ASSERT_SERVES(server) ASSERT_TRUE((server).serves()) << (server).output()

}  // namespace treadle
