// A server's behaviour where the machine gives it less than it needs: addresses for memory, room on
// disk, the right time.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/status.h"
#include "kernels/op_cases/instrumented.h"
#include "tests/attacks/attacked_server.h"
#include "tests/attacks/hostile_client.h"
#include "tests/server/http/http_client.h"
#include "tests/server/test_server.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

class ResourceAttacks : public testing::Test {
 protected:
  const TestFolder folder_;
};

TEST_F(ResourceAttacks, AddressesThatDoNotSufficeAreAnErrorBeforeAnythingIsServed) {
  if (kInstrumented) GTEST_SKIP() << "sanitizers need all addresses";
  AttackedServer server({"--max-batch-tokens", "1048576"}, {.memory_mb = 900, .serves = false});
  EXPECT_EQ(server.process().Wait(), 1) << server.process().output();
  EXPECT_THAT(server.process().output(), HasSubstr("no memory for a buffer of "));
}

// Half of this machine's memory is more addresses than the process may have.
TEST_F(ResourceAttacks, ACacheThatFindsNoAddressesNamesItsFlag) {
  if (kInstrumented) GTEST_SKIP() << "sanitizers need all addresses";
  const int64_t bytes = int64_t{2} << 30;
  if (sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) < 8 * bytes) {
    GTEST_SKIP() << "an automatic cache would fit: this machine has little memory";
  }
  TinyModelOptions tiny;
  tiny.context = 1 << 18;
  const auto model = WriteTinyLlamaGguf(folder_.path(), tiny);
  ASSERT_TRUE(model.ok()) << model.status();
  for (const std::string more :
       {"", " --pipeline-parallel 2", " --pipeline-parallel 2 --on-worker-loss fail"}) {
    for (const bool automatic : {true, false}) {
      SCOPED_TRACE(Str(more, automatic));
      ChildProcess server(
          {"/bin/sh", "-c",
           Str("ulimit -v ", bytes >> 10, " && exec ", TREADLE_BINARY, " serve --model ", *model,
               " --listen 127.0.0.1:0 --http-listen none --metrics-listen none --threads 1"
               " --pin-threads off --max-batch-size 4096",
               more, automatic ? "" : " --kv-memory 3G")});
      EXPECT_EQ(server.Wait(), 1) << server.output();
      EXPECT_THAT(server.output(), HasSubstr("no memory for a K/V cache of "));
      EXPECT_THAT(server.output(),
                  HasSubstr(automatic ? "; --kv-memory is auto, expected a smaller size, "
                                      : "; --kv-memory is 3072M, expected a smaller one"));
    }
  }
}

// The least limit that the refusal names is one under which the server serves, beside as many idle
// connections as it takes.
TEST_F(ResourceAttacks, FilesThatDoNotSufficeAreAnErrorBeforeAnythingIsServed) {
  const std::vector<std::string> all = {
      "--health-listen 127.0.0.1:0", "--ledger-file " + folder_ / "ledger",
      "--record " + folder_ / "record", "--durable " + folder_ / "durable"};
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{}, all,
        std::vector<std::string>{"--pipeline-parallel 2 --tensor-parallel 2"}}) {
    int64_t least = 0;
    for (const int64_t limit : {int64_t{24}, int64_t{-1}}) {
      const int64_t files = limit > 0 ? limit : least - 1;
      SCOPED_TRACE(files);
      AttackedServer server(flags, {.descriptors = files, .serves = false});
      EXPECT_EQ(server.process().Wait(), 1) << server.process().output();
      const std::string& said = server.process().output();
      EXPECT_THAT(said, Not(HasSubstr("listening")));
      const std::string before = Str("this process may open ", files, " files, expected at least ");
      ASSERT_THAT(said, HasSubstr(before));
      const int64_t named = std::atoi(said.c_str() + said.find(before) + before.size());
      EXPECT_THAT(said, HasSubstr(Str("(ulimit -n ", named, ")")));
      EXPECT_TRUE(least == 0 || least == named) << named;
      least = named;
    }
    SCOPED_TRACE(least);
    AttackedServer server(flags, {.descriptors = least});
    std::vector<std::unique_ptr<HttpClient>> web;
    std::vector<std::unique_ptr<HostileClient>> others;
    for (int i = 0; i < 20; ++i) {
      web.push_back(std::make_unique<HttpClient>(server.http_port()));
      others.push_back(std::make_unique<HostileClient>(server.port()));
    }
    const grpc::Status status = server.Honest();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(server.Live());
    EXPECT_THAT(HttpGet(server.http_port(), "/ready"), HasSubstr("200 OK"));
    EXPECT_EQ(server.process().Stop(), 0) << server.process().output();
  }
}

// A disk of a few pages under the log and the ledger, which is full for a while. The disk is seen
// by this thread and what it starts, and goes with them.
TEST_F(ResourceAttacks, AFullDiskCostsLinesAndRecordsAndNoRequest) {
  const std::string disk = folder_.Folder("disk");
  if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=256k") != 0) {
    GTEST_SKIP() << "no small disk can be had on this machine: " << std::strerror(errno);
  }
  const auto count_records = [&] {
    std::ifstream ledger(disk + "/ledger");
    int64_t whole = 0;
    for (std::string line; std::getline(ledger, line);) {
      whole += nlohmann::json::accept(line) ? 1 : 0;
    }
    return whole;
  };
  {
    AttackedServer server({"--ledger-file", disk + "/ledger"}, {});
    ASSERT_TRUE(server.Honest().ok());
    const std::string filler = disk + "/filler";
    std::ofstream(filler) << std::string(1 << 20, 'x');  // as much of it as there is room for
    ASSERT_EQ(fs::space(disk).available, 0u);
    for (int i = 0; i < 300; ++i) ASSERT_TRUE(server.Honest().ok());
    const int64_t before = count_records();
    fs::remove(filler);
    for (int i = 0; i < 300 && count_records() <= before; ++i) {
      ASSERT_TRUE(server.Honest().ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    EXPECT_GT(count_records(), before);
    EXPECT_EQ(server.process().Stop(), 0);
    EXPECT_THAT(server.process().output(), HasSubstr("No space left on device"));
    EXPECT_THAT(server.process().output(), HasSubstr("records were not written"));
  }
  std::ifstream ledger(disk + "/ledger");
  for (std::string line; std::getline(ledger, line);) {
    EXPECT_TRUE(nlohmann::json::accept(line)) << line;
  }
  umount2(disk.c_str(), MNT_DETACH);
}

// Deadlines, watchdogs and time-outs go by a clock that nobody sets.
TEST_F(ResourceAttacks, AWallClockThatJumpsEndsNothing) {
  if (kInstrumented) GTEST_SKIP() << "sanitizers want to be loaded first";
  const std::string file = folder_.Write("clock", std::string(sizeof(double), '\0'));
  const int opened = open(file.c_str(), O_RDWR | O_CLOEXEC);
  auto* const ahead = static_cast<volatile double*>(
      mmap(nullptr, sizeof(double), PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0));
  ASSERT_NE(ahead, MAP_FAILED);
  AttackedServer server({"--pipeline-parallel", "2"},
                        {.before = Str("export LD_PRELOAD=", TREADLE_JUMPING_CLOCK,
                                       " TREADLE_CLOCK=", file, " && ")});
  const auto stub = v1::Inference::NewStub(server.Connect());
  v1::GenerateRequest request;
  request.set_text("Once upon a time");
  request.mutable_stopping()->set_max_new_tokens(200);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_sampling()->set_temperature(0);
  std::string undisturbed;
  for (const double jump : {0.0, 7200.0, -7200.0, 1e8, 0.0}) {
    SCOPED_TRACE(jump);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
    const auto reader = stub->GenerateStream(&context, request);
    std::string text;
    v1::GenerateResponse message;
    for (bool first = true; reader->Read(&message); first = false) {
      text += message.output().text();
      if (first) *ahead = jump;
    }
    const grpc::Status status = reader->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    if (undisturbed.empty()) undisturbed = text;
    EXPECT_EQ(text, undisturbed);
    // gRPC's own timers do go by it, so this may take a while.
    EXPECT_TRUE(server.Honest().ok());
  }
  munmap(const_cast<double*>(ahead), sizeof(double));
  close(opened);
}

}  // namespace
}  // namespace treadle
