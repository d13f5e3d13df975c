// Model files that somebody else made, or changes under us: a clear error, in bounded time and
// memory, and never the end of the process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/status.h"
#include "models/architectures/architecture.h"
#include "tests/server/cli/served_binary.h"
#include "tests/support/file_sum.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class FileAttacks : public testing::Test {
 protected:
  std::string Tiny(const TinyModelOptions& options) const {
    return *WriteTinyLlamaGguf(folder_.path(), options);
  }
  // `treadle serve` of a model, in at most 2 GiB of addresses.
  static std::unique_ptr<ChildProcess> Serve(const std::string& model, const std::string& flags,
                                             const std::string& environment = "") {
    std::string command;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    command = "ulimit -v 2097152 && ";
#endif
    command += Str(environment, "exec ", TREADLE_BINARY, " serve --model ", model, " --device cpu",
                   " --listen 127.0.0.1:0 --http-listen none --metrics-listen none --threads 1 "
                   "--pin-threads off ",
                   flags);
    return std::make_unique<ChildProcess>(std::vector<std::string>{"/bin/sh", "-c", command});
  }
  // Whether the process has the file open, waited for.
  static bool WaitMapped(int pid, const std::string& file) {
    for (int i = 0; i < 2000; ++i) {
      std::ifstream maps(Str("/proc/", pid, "/maps"));
      for (std::string line; std::getline(maps, line);) {
        if (line.ends_with(file)) return true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  const TestFolder folder_;
};

TEST_F(FileAttacks, TablesForAHugeContextAreCounted) {
  TinyModelOptions options;
  options.layers = 1;
  options.hidden = 4096;
  options.heads = options.kv_heads = 1;
  options.ffn_hidden = 64;
  options.context = 1 << 24;
  // Also where the workers that will have them are elsewhere: the master measures with some.
  const auto expect_refused = [&](const std::string& model, const char* workers) {
    const auto server = Serve(model, Str("--kv-memory 16M", workers));
    EXPECT_EQ(server->Wait(), 2) << server->output();
    EXPECT_THAT(server->output(), HasSubstr("context of 16777216 tokens need 262144 MiB"));
    EXPECT_THAT(server->output(), HasSubstr("(llama.context_length of the model is 16777216"));
  };
  const std::string model = Tiny(options);
  for (const char* workers : {"", " --workers 127.0.0.1:1"}) expect_refused(model, workers);
  // GGUF files of Mixtral say that they are Llama's.
  const auto mixtral = WriteTinyGguf(*FindArchitecture("mixtral"), folder_.path(), options);
  ASSERT_TRUE(mixtral.ok()) << mixtral.status();
  expect_refused(*mixtral, "");
}

TEST_F(FileAttacks, WhatWasHashedIsWhatIsLoaded) {
  const std::string model = Tiny({});
  const std::string other = folder_ / "other";
  fs::copy(model, other);
  fs::resize_file(model, 400 << 20);  // the hash takes its time
  const auto sum = FileSha256(model);
  const auto server = Serve(model, "--kv-memory 16M --model-sha256 " + sum);
  ASSERT_TRUE(WaitMapped(server->pid(), model));
  fs::rename(other, model);
  EXPECT_EQ(server->Wait(), 2) << server->output();
  EXPECT_THAT(server->output(), HasSubstr(model + ": was changed while it was read"));
}

// A pipe without a writer is waited for by who opens it blocking, for ever.
TEST_F(FileAttacks, APipeInTheServersFoldersHoldsNoStart) {
  const std::string model = Tiny({});
  const struct {
    const char* flag;
    const char* name;
  } kPipes[] = {{"--durable", "lock"},
                {"--durable", "requests-00000000.log"},
                {"--durable", "requests-00000001.log"},
                {"--durable", "model-sums"},
                {"--prefix-cache-disk", "lock"},
                {"--prefix-cache-disk", "contents"},
                {"--prefix-cache-disk", "unfinished"}};
  int number = 0;
  for (const auto& [flag, name] : kPipes) {
    SCOPED_TRACE(Str(flag, " with the pipe ", name));
    const std::string folder = folder_.Folder(Str("pipes", ++number));
    ASSERT_EQ(mkfifo((folder + "/" + name).c_str(), 0600), 0);
    const auto server =
        Serve(model, Str("--kv-memory 16M ", flag, " ", folder, flag[2] == 'p' ? ":64M" : ""));
    // It listens, or has ended with an error that names the file.
    if (server->WaitForLine("gRPC").empty()) {
      EXPECT_NE(server->Wait(), 0);
      EXPECT_THAT(server->output(), HasSubstr(folder));
    }
  }
}

TEST_F(FileAttacks, AModelsNameIsShortAndPrintable) {
  const std::string name = "\x1b[2J" + std::string(240, 'x');
  const auto model = WriteTinyLlamaFolder(folder_.Folder(name), {});
  ASSERT_TRUE(model.ok()) << model.status();
  const auto server = Serve("'" + *model + "'", "--kv-memory 16M --log-format json");
  const std::string line = server->WaitForLine("model_loaded");
  EXPECT_THAT(line, HasSubstr("\"\\\\x1b[2J" + std::string(190, 'x') + "...\""));
}

TEST_F(FileAttacks, AFileThatShrinksWhileItIsHashedIsNamed) {
  const std::string model = Tiny({});
  fs::resize_file(model, 1 << 30);
  const auto server = Serve(model, "--model-sha256 " + std::string(64, '0'));
  ASSERT_TRUE(WaitMapped(server->pid(), model));
  fs::resize_file(model, 4096);
  EXPECT_EQ(server->Wait(), 2) << server->output();
  EXPECT_THAT(server->output(), HasSubstr(model + ": was changed while it was read"));
}

// Stages of their own processes, the first of which looks embeddings up.
TEST_F(FileAttacks, AFileThatShrinksWhileItIsServedIsNotMissed) {
  for (const char* flags : {"", " --weights-from master"}) {
    const std::string model = Tiny({});
    const auto server =
        Serve(model, Str("--kv-memory 16M --pipeline-parallel 2 --on-worker-loss fail", flags));
    const std::string line = server->WaitForLine("listening on 127.0.0.1:");
    ASSERT_NE(line, "") << server->output();
    ASSERT_NE(server->WaitForLine("ready"), "") << server->output();
    fs::resize_file(model, 1);
    RunToEnd(Treadle("generate --max-new-tokens 4 --target " + WordAfter(line, "listening on "),
                     {"--prompt", "Once upon a time"}));
  }
}

// No attack, but the operator's only way out: nothing that loads keeps a signal waiting.
TEST_F(FileAttacks, ASignalStopsALoadAtOnce) {
  const std::string model = Tiny({});
  fs::resize_file(model, 1 << 30);
  for (const bool hashing : {true, false}) {
    const auto server = hashing ? Serve(model, "--model-sha256 " + std::string(64, '0'))
                                : Serve("random:smollm2-135m", "--weights nf4");
    if (hashing) {
      ASSERT_TRUE(WaitMapped(server->pid(), model));
    } else {
      ASSERT_NE(server->WaitForLine("loading random:smollm2-135m"), "") << server->output();
    }
    server->Signal(hashing ? SIGTERM : SIGINT);
    EXPECT_EQ(server->Wait(), 0) << server->output();
    EXPECT_THAT(server->output(), HasSubstr("stopped while loading"));
  }
}

TEST_F(FileAttacks, AStoppedLoadLeavesNoWorkersBehind) {
  const auto server =
      Serve("random:smollm2-135m", "--weights nf4 --pipeline-parallel 2 --max-context 512",
            "TMPDIR=" + folder_.path() + " ");
  ASSERT_NE(server->WaitForLine("loading layers"), "") << server->output();
  EXPECT_FALSE(fs::is_empty(folder_.path()));
  server->Signal(SIGTERM);
  EXPECT_EQ(server->Wait(), 0) << server->output();  // and the workers have closed the pipe
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(FileAttacks, ASignalStopsAWorkersLoadAtOnce) {
  const std::string model = "random:smollm2-135m";
  WorkerBinary worker("--pin-threads off --device cpu --model " + model);
  const auto server =
      Serve(model, "--weights nf4 --kv-memory 64M --max-context 512 --workers " + worker.address());
  ASSERT_NE(worker.WaitForLine("loading layers"), "") << worker.output();
  EXPECT_EQ(worker.Stop(), 0) << worker.output();
}

}  // namespace
}  // namespace treadle
