#include "server/configuration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

#include "base/status.h"
#include "net/address.h"

namespace treadle {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// The error of a command line, or "".
std::string Parse(const std::string& line, ServeOptions& options) {
  CLI::App app;
  AddServeFlags(app, options);
  try {
    app.parse(line);
  } catch (const CLI::ParseError& error) {
    return error.what();
  }
  return "";
}

TEST(Configuration, FlagsReachTheirFields) {
  ServeOptions options;
  ASSERT_EQ(
      Parse(
          "--model m.gguf --listen 127.0.0.1:0 --metrics-listen none --max-batch-size 16 "
          "--max-batch-tokens 256 --max-queue 9 --max-context 2048 --kv-memory 1.5G "
          "--kv-dtype f32 --page-size 16 --weights nf4,lm_head=int8 --outlier-threshold 3.5 "
          "--outlier-rule per-call --compute exact --policy faster-transformer --microbatch-size 4 "
          "--padding compute "
          "--threads 3 --pin-threads off --engine-depth 1 --default-max-new-tokens 7 "
          "--workers a:1,[::1]:2,unix:/c --tensor-parallel 3 --wire int8 --weights-from master "
          "--plan-forwarding late --data-plane gloo "
          "--on-worker-loss fail --drain-timeout 500ms --stream-stall-timeout 2m --ledger-file "
          "l.jsonl --http-allow-origin https://A.example,http://b:3000 --log-format json "
          "--log-level error --log-file l.log --log-requests off --speculate draft:d:1.gguf",
          options),
      "");
  EXPECT_EQ(options.model, "m.gguf");
  EXPECT_EQ(options.metrics_listen, "none");
  EXPECT_EQ(options.max_batch_size, 16);
  EXPECT_EQ(options.kv_memory, int64_t{3} << 29);
  EXPECT_EQ(options.kv_dtype, DType::kF32);
  EXPECT_EQ(options.weights.text(), "nf4,lm_head=int8");
  EXPECT_EQ(options.outlier_threshold, 3.5f);
  EXPECT_EQ(options.outlier_rule, OutlierRule::kPerCall);
  EXPECT_EQ(options.policy, "faster-transformer");
  EXPECT_EQ(options.microbatch_size, 4);
  EXPECT_EQ(options.padding, Padding::kCompute);
  EXPECT_THAT(options.workers, testing::ElementsAre("a:1", "[::1]:2", "unix:/c"));
  EXPECT_THAT(options.http_allow_origins,
              testing::ElementsAre("https://a.example", "http://b:3000"));
  EXPECT_EQ(options.stages(), 3);
  EXPECT_EQ(options.tensor_parallel, 3);
  EXPECT_EQ(options.wire, WireType::kInt8);
  EXPECT_EQ(options.data_plane, DataPlane::kGloo);
  EXPECT_EQ(options.plan_forwarding, PlanForwarding::kLate);
  EXPECT_EQ(options.weights_from, WeightsFrom::kMaster);
  EXPECT_EQ(options.on_worker_loss, OnWorkerLoss::kFail);
  EXPECT_FALSE(options.pin_threads);
  EXPECT_EQ(options.drain_timeout.count(), 500);
  EXPECT_EQ(options.stream_stall_timeout.count(), 120'000);
  EXPECT_EQ(options.log_format, LogFormat::kJson);
  EXPECT_EQ(options.log_level, Severity::kError);
  EXPECT_EQ(options.log_file, "l.log");
  EXPECT_FALSE(options.log_requests);
  EXPECT_EQ(options.speculate, Speculate::kDraft);
  EXPECT_EQ(options.draft_model, "d:1.gguf");
  EXPECT_TRUE(CheckServeOptions(options).ok());
}

TEST(Configuration, NothingIsGuessedOnGpusUnlessAsked) {
  EXPECT_EQ(SpeculateOf({}, /*cuda=*/false), Speculate::kNgram);
  EXPECT_EQ(SpeculateOf({}, /*cuda=*/true), Speculate::kOff);
  ServeOptions asked;
  asked.speculate = Speculate::kNgram;
  EXPECT_EQ(SpeculateOf(asked, /*cuda=*/true), Speculate::kNgram);
}

struct BadFlag {
  const char* line;
  const char* message;
};

TEST(Configuration, AListMayBeOneFlagOrSeveral) {
  for (const char* flags : {"--served-model-name a,org/b --workers x:1,y:2",
                            "--served-model-name a --workers x:1 --served-model-name org/b "
                            "--workers y:2"}) {
    ServeOptions options;
    ASSERT_EQ(Parse(flags, options), "") << flags;
    EXPECT_THAT(options.served_model_names, testing::ElementsAre("a", "org/b")) << flags;
    EXPECT_THAT(options.workers, testing::ElementsAre("x:1", "y:2")) << flags;
  }
  ServeOptions options;
  EXPECT_THAT(Parse("--served-model-name a,,b", options), testing::HasSubstr("has '', expected"));
}

TEST(Configuration, ABadFlagSaysNameValueAndExpectation) {
  const BadFlag bad[] = {
      {"--max-batch-size 0", "--max-batch-size: is '0', expected auto or a whole number from 1"},
      {"--max-batch-size 4x", "is '4x', expected auto or a whole number"},
      {"--max-queue 99999999999999999999", "is '99999999999999999999', expected a whole number"},
      {"--kv-memory 2Q", "--kv-memory: is '2Q', expected auto or a size such as 2G"},
      {"--kv-memory -1", "expected auto or a size"},
      {"--kv-memory nan", "expected auto or a size"},
      {"--kv-dtype f8", "--kv-dtype: is 'f8', expected f16 or bf16 or f32 or int8"},
      {"--compute fast", "expected auto or exact or int8 or int12 or int16"},
      {"--weights nf4,lm_head=int9", "--weights: has 'lm_head=int9'"},
      {"--outlier-threshold -1", "--outlier-threshold: is '-1', expected a number from 0 to"},
      {"--outlier-threshold nan", "--outlier-threshold: is 'nan', expected a number"},
      {"--outlier-rule mine", "--outlier-rule: is 'mine', expected per-row or per-call"},
      {"--policy random", "--policy: is 'random'"},
      {"--drain-timeout 10", "--drain-timeout: is '10', expected a time such as 30s"},
      {"--listen 50051", "address is '50051', expected host:port"},
      {"--metrics-listen 127.0.0.1:99999", "address is '127.0.0.1:99999', expected host:port"},
      {"--engine-depth 3", "--engine-depth: is '3', expected a whole number from 1 to 2"},
      {"--speculate draft", "--speculate: is 'draft', expected auto, off, ngram or draft:MODEL"},
      {"--speculate draft:", "--speculate: is 'draft:', expected auto, off, ngram or draft:MODEL"},
      {"--page-size 24", "--page-size: is '24', expected a power of two from 16 to 4096"},
      {"--tensor-parallel 0", "--tensor-parallel: is '0', expected a whole number from 1 to 64"},
      {"--pipeline-parallel x", "--pipeline-parallel: is 'x', expected a whole number from 1"},
      {"--workers a:1,b", "--workers: address is 'b', expected host:port"},
      {"--workers a:1,", "--workers: address is '', expected host:port"},
      {"--http-allow-origin https://a.example/", "--http-allow-origin: has 'https://a.example/', "},
      {"--http-allow-origin a.example,*", "has 'a.example', expected https://host, "},
      {"--workers a:0", "--workers: address is 'a:0', expected the port of a worker"},
      {"--workers a:1,b:1,a:1", "--workers: has a:1 twice"},
      {"--wire f16", "--wire: is 'f16', expected f32 or bf16 or int8"},
      {"--data-plane mpi", "--data-plane: is 'mpi', expected gloo or nccl"},
      {"--plan-forwarding no", "--plan-forwarding: is 'no', expected early or late"},
      {"--weights-from disk", "--weights-from: is 'disk', expected file or master"},
      {"--on-worker-loss ignore",
       "--on-worker-loss: is 'ignore', expected fail or restart or recover"},
      {"--log-format xml", "--log-format: is 'xml', expected text or json"},
      {"--log-level debug", "--log-level: is 'debug', expected info or warning or error"},
      {"--log-requests 1", "--log-requests: is '1', expected on or off"},
      {"--no-such-flag", "--no-such-flag"},
  };
  for (const BadFlag& flag : bad) {
    ServeOptions options;
    EXPECT_THAT(Parse(flag.line, options), HasSubstr(flag.message)) << flag.line;
  }
}

TEST(Configuration, OptionsThatContradictEachOther) {
  ServeOptions options;
  EXPECT_THAT(std::string(CheckServeOptions(options).message()), HasSubstr("--model is missing"));
  options.model = "m";
  options.max_batch_size = options.max_batch_tokens = 32;
  EXPECT_THAT(std::string(CheckServeOptions(options).message()),
              HasSubstr("--max-batch-tokens is 32, expected more than --max-batch-size (32)"));
  options = {.model = "m", .max_request_bytes = 40 << 20};
  EXPECT_THAT(std::string(CheckServeOptions(options).message()),
              HasSubstr("--max-receive-memory is 33554432, expected at least --max-request-bytes"));
  options.max_receive_memory = 40 << 20;
  EXPECT_THAT(std::string(CheckServeOptions(options).message()),
              HasSubstr("--max-unread-bytes is 33554432, expected at least --max-request-bytes"));
  options.max_unread_bytes = 40 << 20;
  options.kv_events = true;
  EXPECT_TRUE(CheckServeOptions(options).ok());
  options.prefix_cache = false;
  EXPECT_THAT(std::string(CheckServeOptions(options).message()),
              HasSubstr("--kv-events is on, but --prefix-cache is off"));
  using O = ServeOptions;
  for (const auto& [change, why] :
       {std::pair<void (*)(O&), const char*>{[](O& o) { o.prefix_cache = false; },
                                             "--prefix-cache is off; expected on"},
        {[](O& o) { o.pipeline_parallel = 2; }, "in worker processes; expected it in this one"},
        {[](O& o) { o.tensor_parallel = 2; }, "--tensor-parallel is more than 1; expected 1"},
        {[](O& o) { o.record = "r"; }, "--record has no place for pages"}}) {
    options = {.model = "m"};
    options.prefix_cache_disk = {"f", 1 << 20};
    EXPECT_TRUE(CheckServeOptions(options).ok());
    change(options);
    EXPECT_THAT(std::string(CheckServeOptions(options).message()),
                AllOf(HasSubstr("--prefix-cache-disk is set, but "), HasSubstr(why)));
  }
  options = {.model = "m", .policy = "request-level"};
  EXPECT_TRUE(CheckServeOptions(options).ok());
  options.max_ttft = std::chrono::seconds(1);
  EXPECT_THAT(std::string(CheckServeOptions(options).message()),
              HasSubstr("--max-ttft is set, but --policy is request-level"));
  options.policy = "faster-transformer";
  EXPECT_THAT(std::string(CheckServeOptions(options).message()),
              HasSubstr("--max-ttft is set, but --policy is faster-transformer"));
  options.max_ttft = std::chrono::seconds(0);
  options.microbatch_size = 2;
  EXPECT_TRUE(CheckServeOptions(options).ok());
  options.policy = "fcfs";
  EXPECT_THAT(std::string(CheckServeOptions(options).message()),
              HasSubstr("--microbatch-size is 2, but --policy is fcfs"));
  options.microbatch_size = 0;
  options.padding = Padding::kCompute;
  EXPECT_THAT(std::string(CheckServeOptions(options).message()),
              HasSubstr("--padding is compute, but --policy is fcfs"));
}

TEST(Configuration, ParallelismThatCannotBe) {
  const BadFlag bad[] = {
      {"--pipeline-parallel 3 --workers a:1,b:1", "--pipeline-parallel is 3, but --workers has 2"},
      {"--spares 1", "--spares is 1, but there are 0 workers; expected more of them"},
      {"--spares 2 --workers a:1,b:1", "--spares is 2, but there are 2 workers"},
      {"--wire bf16", "--wire is bf16, but with one stage nothing is sent"},
      {"--wire int8 --workers a:1", "--wire is int8, but with one stage nothing is sent"},
      {"--data-plane nccl", "--data-plane is nccl, but with one stage nothing is sent"},
      {"--data-plane nccl --pipeline-parallel 2 --wire bf16",
       "--data-plane is nccl, but --wire is bf16, which only the host encodes; expected f32"},
      {"--data-plane nccl --workers a:1,b:1 --wire int8",
       "--data-plane is nccl, but --wire is int8"},
      {"--data-plane nccl --pipeline-parallel 2 --device cpu",
       "--data-plane is nccl, but --device is cpu; expected cuda, or gloo"},
      {"--plan-forwarding late", "--plan-forwarding is late, but with one stage nothing is passed"},
      {"--weights-from master", "--weights-from is master, but there are no workers"},
  };
  for (const BadFlag& flag : bad) {
    ServeOptions options;
    ASSERT_EQ(Parse(Str("--model m ", flag.line), options), "");
    EXPECT_THAT(std::string(CheckServeOptions(options).message()), HasSubstr(flag.message));
  }
  for (const char* good : {"--pipeline-parallel 2 --workers a:1,b:1 --wire bf16",
                           "--workers a:1 --weights-from master", "--tensor-parallel 3",
                           "--pipeline-parallel 2 --data-plane nccl",
                           "--workers a:1,b:1 --data-plane nccl --device cuda --wire f32",
                           "--pipeline-parallel 4 --wire int8 --weights-from master"}) {
    ServeOptions options;
    ASSERT_EQ(Parse(Str("--model m ", good), options), "");
    EXPECT_TRUE(CheckServeOptions(options).ok()) << good;
  }
}

TEST(Configuration, SecurityThatCannotBe) {
  const BadFlag bad[] = {
      {"--tls-cert c", "--tls-key is missing, expected both of --tls-cert and --tls-key"},
      {"--tls-key k", "--tls-cert is missing"},
      {"--tls-client-ca a", "--tls-client-ca needs --tls-cert and --tls-key"},
      {"--metrics-tls-cert c", "--metrics-tls-key is missing, expected both of --metrics-tls-cert"},
      {"--metrics-tls-key k", "--metrics-tls-cert is missing"},
      {"--metrics-tls-client-ca a --tls-cert c --tls-key k",
       "--metrics-tls-client-ca needs --metrics-tls-cert and --metrics-tls-key"},
      {"--metrics-auth api-key", "there is no --api-keys-file"},
      {"--metrics-auth api-key --api-keys-file f --metrics-token-file t",
       "--metrics-auth is api-key, but there is a --metrics-token-file"},
  };
  for (const BadFlag& flag : bad) {
    ServeOptions options;
    ASSERT_EQ(Parse(Str("--model m ", flag.line), options), "");
    EXPECT_THAT(std::string(CheckServeOptions(options).message()), HasSubstr(flag.message));
  }
  for (const char* good :
       {"--metrics-tls-cert c --metrics-tls-key k --metrics-tls-client-ca a",
        "--metrics-token-file t --api-keys-file f", "--metrics-auth api-key --api-keys-file f"}) {
    ServeOptions options;
    ASSERT_EQ(Parse(Str("--model m ", good), options), "");
    EXPECT_TRUE(CheckServeOptions(options).ok()) << good;
  }
}

TEST(Configuration, TheEffectiveConfigurationNamesEveryFlagAndReadsBack) {
  ServeOptions options;
  options.kv_memory = int64_t{1} << 30;
  const std::string text = ToText(Describe(options, /*all=*/true));
  EXPECT_THAT(text, HasSubstr("listen = 127.0.0.1:50051\n"));
  EXPECT_THAT(text, HasSubstr("kv-memory = 1024M\n"));
  EXPECT_THAT(text, HasSubstr("drain-timeout = 30s\n"));
  for (const ServeFlag& flag : ServeFlags()) {
    EXPECT_THAT(text, HasSubstr(std::string(flag.name).substr(2) + " = "));
  }
}

TEST(Configuration, AtStartOnlyWhatDiffersFromTheDefaultsIsShown) {
  ServeOptions options;
  EXPECT_TRUE(Describe(options, /*all=*/false).fields.empty());
  options.model = "m.gguf";
  options.pin_threads = false;
  options.max_queue = 1024;  // the default, as somebody wrote it
  EXPECT_EQ(ToText(Describe(options, /*all=*/false)), "model = m.gguf\npin-threads = off\n");
}

TEST(Configuration, NothingListensBeyondLoopbackByDefault) {
  const ServeOptions options;
  EXPECT_EQ(ParseAddress(options.listen)->host, "127.0.0.1");
  EXPECT_EQ(ParseAddress(options.metrics_listen)->host, "127.0.0.1");
}

TEST(Address, ReadsAndRejects) {
  EXPECT_EQ(ParseAddress("[::1]:80")->host, "::1");
  EXPECT_EQ(ToString({"::1", 80}), "[::1]:80");
  for (const char* bad : {"", ":1", "host", "host:", "host:x", "host:-1", "host:65536", "::1:80"}) {
    EXPECT_FALSE(ParseAddress(bad).ok()) << bad;
  }
}

TEST(Configuration, BatchSizesAreAutoUnlessGiven) {
  ServeOptions options;
  EXPECT_EQ(options.max_batch_size, 0);
  EXPECT_EQ(options.max_batch_tokens, 0);
  EXPECT_EQ(
      Parse("--model m --max-batch-size auto --max-batch-tokens auto --target-itl 40ms", options),
      "");
  EXPECT_EQ(options.max_batch_size, 0);
  EXPECT_EQ(options.target_itl, std::chrono::milliseconds(40));
  // Fewer tokens than the default size has sequences are no contradiction.
  options.max_batch_tokens = 20;
  EXPECT_EQ(CheckServeOptions(options), absl::OkStatus());
  EXPECT_THAT(Parse("--target-itl fast", options), HasSubstr("--target-itl: is 'fast', expected"));
}

}  // namespace
}  // namespace treadle
