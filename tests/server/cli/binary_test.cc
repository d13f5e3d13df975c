// The treadle binary as users meet it: exit codes, one-line errors, serving, signals.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "net/address.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/served_binary.h"
#include "tests/support/default_model.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using testing::HasSubstr;

TEST(Binary, WrongUseIsOneLineAndExitCodeTwo) {
  const std::pair<const char*, const char*> uses[] = {
      {"fly", "'fly' is no command, expected one of: serve worker generate"},
      {"serve", "treadle serve: --model is missing"},
      {"serve --model x --max-batch-size 0", "--max-batch-size: is '0', expected"},
      {"serve --model x --max-batch-size 32 --max-batch-tokens 32",
       "more than --max-batch-size (32)"},
      {"serve --nonsense", "--nonsense"},
      {"serve --max-batch-siz=3", "; did you mean '--max-batch-size'? (see --help)"},
      {"generate --prompt a --top_p 1", "; did you mean '--top-p'? (see --help)"},
      // The values of the next two are taken for models.
      {"generate --target b --prompt a --max-new-token 3", "'--max-new-token' is no flag of this"},
      {"bench serve --num-prompt 3", "command; did you mean '--num-prompts'? (see --help)"},
      {"generate --prompt --top_p --timeout", "--timeout: 1 required"},
      {"generate --top-p x --prompt a", "--top-p"},
      {"generate --model a --target b --prompt a", "excludes"},
      {"generate --timeout 5 --prompt a", "--timeout is '5', expected a time"},
  };
  for (const auto& [words, message] : uses) {
    const std::string said = RunToEnd(Treadle(words), 2);
    EXPECT_THAT(said, HasSubstr(message));
    EXPECT_EQ(std::ranges::count(said, '\n'), 1) << said;
  }
}

TEST(Binary, AMissingModelFileIsNamed) {
  EXPECT_THAT(RunToEnd(ServedBinary::Command("--model /no/such/model.gguf"), 2),
              HasSubstr("/no/such/model.gguf"));
}

TEST(Binary, ComplaintsDoNotDriveATerminal) {
  EXPECT_THAT(RunToEnd(Treadle("inspect", {"/no/such\x1b[2J\xff"}), 2),
              HasSubstr("/no/such\\x1b[2J\\xff: cannot be opened"));
}

TEST(Binary, HelpAndVersion) {
  for (const char* command : {"serve", "generate", "inspect"}) {
    EXPECT_THAT(RunToEnd(Treadle(Str(command, " --help"))), HasSubstr("--help"));
  }
  EXPECT_THAT(RunToEnd(Treadle("--version")), testing::StartsWith("treadle "));
}

TEST(Binary, AnOccupiedPortIsNamed) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  socklen_t size = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  const std::string taken = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  const std::string any = "127.0.0.1:0";
  for (const bool http : {false, true}) {
    const auto said = [&](const std::string& model, int code) {
      return RunToEnd(Treadle(Str("serve --metrics-listen none --listen ", http ? any : taken,
                                  " --http-listen ", http ? taken : "none", " --model ", model)),
                      code);
    };
    EXPECT_EQ(said(OwnModel(), 1),
              "treadle serve: cannot listen on " + taken + ": Address already in use\n");
    // A port may be free a moment later; a wrong path stays wrong, so it is told first.
    EXPECT_THAT(said("/no/such.gguf", 2), HasSubstr("/no/such.gguf: cannot be opened"));
  }
  close(fd);
}

std::string Flags(const std::string& model, const std::string& drain_timeout) {
  return Str("--http-listen none --metrics-listen 127.0.0.1:0 --max-context 1024 --kv-memory 256M",
             " --model ", model, " --drain-timeout ", drain_timeout);
}

TEST(Binary, APrefixCacheThatIsLargerThanTheKvCacheIsRefused) {
  NEEDS_DEFAULT_MODEL(model);
  const std::string small = "--max-context 1024 --kv-memory 64M --prefix-cache-memory 1G ";
  EXPECT_THAT(RunToEnd(ServedBinary::Command(small, {"--model", model}), 2),
              HasSubstr("--prefix-cache-memory is 1024M, expected at most the K/V cache's 64M"));
}

// The proxy leads nowhere. Whoever set it for the rest of the world did not mean this machine.
TEST(Binary, ProxiesOfTheEnvironmentAreNotForThisMachine) {
  const auto under = [](const std::string& proxy, std::vector<std::string> command) {
    std::vector<std::string> all = {"/usr/bin/env"};
    for (const char* name : {"http_proxy", "https_proxy", "grpc_proxy"}) {
      all.push_back(std::string(name) + "=http://" + proxy);
    }
    all.insert(all.end(), {"no_proxy=b.invalid", "no_grpc_proxy=b.invalid"});
    all.insert(all.end(), command.begin(), command.end());
    return all;
  };
  const ServedBinary server(ServedBinary::kGrpcOnly, {"--model", OwnModel()});
  const std::string& address = server.address();
  for (const std::string& target : {address, "dns:///" + address, "ipv4:" + address}) {
    RunToEnd(under("127.0.0.1:1",
                   Treadle("generate --max-new-tokens 1 --prompt a", {"--target", target})));
  }
  for (const std::string command :
       {"top --once --json --interval 100ms", "bench serve --num-prompts 1 --output-len 1"}) {
    RunToEnd(under("127.0.0.1:1", Treadle(command, {"--target", address})));
  }

  // Others are reached through it, but for no_proxy's.
  Address proxy{.host = "127.0.0.1"};
  const int listener = *OpenListener(proxy);
  for (const std::string target : {"b.invalid:1", "a.invalid:1"}) {
    ChildProcess generate(
        under(ToString(proxy), Treadle("generate --timeout 60s --prompt a", {"--target", target})));
    if (target == "b.invalid:1") {
      EXPECT_EQ(generate.Wait(), 1) << generate.output();
      EXPECT_EQ(accept(listener, nullptr, nullptr), -1);  // nobody came
      EXPECT_THAT(generate.output(), HasSubstr("b.invalid"));
      continue;
    }
    pollfd wait{.fd = listener, .events = POLLIN, .revents = 0};
    ASSERT_EQ(poll(&wait, 1, 60'000), 1);
    const int client = accept(listener, nullptr, nullptr);
    char asked[64] = "";
    EXPECT_GT(recv(client, asked, sizeof asked - 1, 0), 0);
    EXPECT_THAT(asked, HasSubstr("CONNECT a.invalid:1"));
    close(client);
  }
  close(listener);
}

TEST(Binary, ServesGeneratesAndDrainsOnSigterm) {
  NEEDS_DEFAULT_MODEL(model);
  // Four minutes: builds under a sanitizer are slow.
  ServedBinary server(Flags(model, "4m"));
  // Flags that differ from the defaults are printed, and choices, but not the rest.
  EXPECT_THAT(server.output(), HasSubstr("max-context = 1024\n"));
  EXPECT_THAT(server.output(), HasSubstr("chosen automatically: "));
  EXPECT_THAT(server.output(), testing::Not(HasSubstr("max-batch-size")));

  const auto json = nlohmann::json::parse(
      RunToEnd(Treadle("generate --max-new-tokens 12 --json --target " + server.address(),
                       {"--chat", "What is the capital of France?"})));
  EXPECT_EQ(json["text"], "The capital of France is Paris.");
  EXPECT_EQ(json["finish_reason"], "stop");
  EXPECT_EQ(json["usage"]["prompt_tokens"], 37);

  // A stream that is under way when the signal comes is finished.
  grpc::ClientContext context;
  const auto reader = server.stub().GenerateStream(&context, GreedyRequest(60));
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  server.Signal(SIGTERM);
  int tokens = message.output().token_ids_size();
  while (reader->Read(&message)) tokens += message.output().token_ids_size();
  const grpc::Status status = reader->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(tokens, 60);
  EXPECT_EQ(server.Wait(), 0) << server.output();
  EXPECT_THAT(server.output(), HasSubstr("drained\n"));
}

TEST(Binary, ASecondSignalEndsAtOnce) {
  NEEDS_DEFAULT_MODEL(model);
  ServedBinary server(Flags(model, "1h"));
  grpc::ClientContext context;
  const auto reader = server.stub().GenerateStream(&context, GreedyRequest(1000));
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  server.Signal(SIGTERM);
  ASSERT_NE(server.WaitForLine("draining"), "");
  server.Signal(SIGINT);
  EXPECT_EQ(server.Wait(), 128 + SIGINT);
}

TEST(Binary, GeneratesInProcessWithTheSameResultAsTheServer) {
  NEEDS_DEFAULT_MODEL(model);
  const std::string ask =
      "generate --token-ids 504,3575,282 --max-new-tokens 8 --logprobs 5 --prompt-logprobs 0 "
      "--json ";
  const std::string local = RunToEnd(Treadle(ask + "--pin-threads off", {"--model", model}));
  ServedBinary server(Flags(model, "10s"));
  // Progress lines come before the object.
  auto in_process = nlohmann::json::parse(local.substr(local.find('{')));
  auto over_grpc = nlohmann::json::parse(RunToEnd(Treadle(ask + "--target " + server.address())));
  ASSERT_EQ(in_process["token_ids"].size(), 8u);
  ASSERT_EQ(in_process["logprobs"].size(), 8u);
  EXPECT_EQ(in_process["logprobs"][0]["top"].size(), 5u);
  EXPECT_EQ(in_process["prompt_logprobs"].size(), 2u);
  EXPECT_EQ(in_process["logprobs"][3]["token_id"], in_process["token_ids"][3]);
  for (auto* json : {&in_process, &over_grpc}) {
    // Drawn from all 64 bits: one in four billion has none above the 32nd.
    EXPECT_GT(json->at("seed").get<uint64_t>() >> 32, 0u);
    json->erase("timing");
    json->erase("seed");
  }
  EXPECT_EQ(in_process, over_grpc);
}

TEST(Binary, GenerateSamplesAsTheModelsAuthorsRecommend) {
  const TestFolder folder;
  const auto model = WriteTinyLlamaFolder(folder.path(), {});
  ASSERT_TRUE(model.ok()) << model.status();
  const auto tokens = [&](const std::string& more) {
    const std::string said = RunToEnd(Treadle(  // progress lines come first
        "generate --token-ids 1,2,3 --max-new-tokens 12 --seed 7 --ignore-eos --json " + more));
    return nlohmann::json::parse(said.substr(said.find('{')), nullptr, false)["token_ids"];
  };
  const auto here = [&](const std::string& more) {
    return tokens(Str("--pin-threads off --model ", *model, " ", more));
  };
  const auto greedy = here("--temperature 0");
  EXPECT_EQ(here(""), greedy);
  std::ofstream(*model + "/generation_config.json") << R"({"temperature": 5, "top_k": 40})";
  const auto recommended = here("--temperature 5 --top-k 40");
  EXPECT_NE(recommended, greedy);
  EXPECT_EQ(here(""), recommended);
  EXPECT_EQ(here("--temperature 0"), greedy);
  EXPECT_EQ(here("--generation-config none"), greedy);
  ServedBinary server(Str(ServedBinary::kGrpcOnly, "--model ", *model));
  EXPECT_EQ(tokens("--target " + server.address()), recommended);
}

}  // namespace
}  // namespace treadle
