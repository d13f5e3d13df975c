#include "tests/attacks/attacked_server.h"

#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "base/status.h"
#include "tests/server/cli/served_binary.h"
#include "tests/server/test_server.h"

namespace treadle {
AttackedServer::AttackedServer(const std::vector<std::string>& flags, const Limits& limits,
                               const std::string& model) {
  std::string command = limits.before;
  if (limits.descriptors > 0) command += Str("ulimit -n ", limits.descriptors, " && ");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  if (limits.memory_mb > 0) command += Str("ulimit -v ", limits.memory_mb * 1024, " && ");
#endif
  command += Str("exec ", TREADLE_BINARY, " serve --model ", model.empty() ? OwnModel() : model,
                 " --listen 127.0.0.1:0 --http-listen 127.0.0.1:0 --metrics-listen none --threads 1"
                 " --pin-threads off --kv-memory 16M --log-requests off");
  for (const std::string& flag : flags) command += " " + flag;
  process_ = std::make_unique<ChildProcess>(std::vector<std::string>{"/bin/sh", "-c", command});
  if (!limits.serves) return;
  const std::string line = process_->WaitForLine("gRPC on 127.0.0.1:");
  port_ = std::atoi(WordAfter(line, "gRPC on 127.0.0.1:").c_str());
  http_port_ = std::atoi(WordAfter(line, "http://127.0.0.1:").c_str());
  EXPECT_TRUE(port_ > 0 && http_port_ > 0) << process_->output();
  EXPECT_NE(process_->WaitForLine("ready"), "");
}

bool AttackedServer::alive() { return kill(process_->pid(), 0) == 0; }

std::shared_ptr<grpc::Channel> AttackedServer::Connect(int through) const {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  return grpc::CreateCustomChannel(Str("127.0.0.1:", through == 0 ? port_ : through),
                                   grpc::InsecureChannelCredentials(), arguments);
}

grpc::Status AttackedServer::Honest() {
  const auto stub = v1::Inference::NewStub(Connect());
  const auto deadline = std::chrono::system_clock::now() + std::chrono::minutes(1);
  while (true) {
    grpc::ClientContext context;
    context.set_deadline(deadline);
    context.set_wait_for_ready(true);
    v1::GenerateRequest request;
    request.set_text("Once upon a time");
    request.mutable_stopping()->set_max_new_tokens(4);
    v1::GenerateResponse response;
    const grpc::Status status = stub->Generate(&context, request, &response);
    if (status.error_code() != grpc::StatusCode::RESOURCE_EXHAUSTED) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

bool AttackedServer::Live() {
  std::string response;
  return RawCall(Connect(), "/grpc.health.v1.Health/Check", "\x0a\x04live", response).ok() &&
         response == "\x08\x01";
}

int64_t AttackedServer::memory_bytes() const {
  std::ifstream file(Str("/proc/", process_->pid(), "/statm"));
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int64_t AttackedServer::peak_memory_mb() const {
  std::ifstream file(Str("/proc/", process_->pid(), "/status"));
  int64_t kilobytes = 0;
  for (std::string key; file >> key && key != "VmHWM:";) {
  }
  file >> kilobytes;
  return kilobytes >> 10;
}

int64_t AttackedServer::descriptors() const {
  const std::filesystem::directory_iterator files(Str("/proc/", process_->pid(), "/fd"));
  return std::distance(begin(files), end(files));
}

bool AttackedServer::WaitDescriptors(int64_t count) const {
  for (int i = 0; i < 300 && descriptors() > count; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return descriptors() <= count;
}

void AttackTest::Start(const std::vector<std::string>& flags, int64_t descriptors) {
  server_ = std::make_unique<AttackedServer>(
      flags, AttackedServer::Limits{.descriptors = descriptors, .memory_mb = 1800});
  ASSERT_TRUE(server_->Honest().ok());
  memory_ = server_->memory_mb();
  descriptors_ = server_->descriptors();
}

void AttackTest::ExpectService() {
  ASSERT_TRUE(server_->alive());
  const grpc::Status status = server_->Honest();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(server_->Live());
}

void AttackTest::TearDown() {
  if (!server_) return;
  ExpectService();
  ExpectLittleMemory();
  EXPECT_TRUE(server_->WaitDescriptors(descriptors_ + 3)) << server_->descriptors();
}

}  // namespace treadle
