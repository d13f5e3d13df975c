// A recording of `treadle serve --record` is what `treadle replay` runs again: a server
// of two stages with two ranks each, one of whose workers is killed.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "base/status.h"
#include "engine/record/record.pb.h"
#include "engine/record/record_file.h"
#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/served_binary.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using testing::Not;

// Output of `treadle replay`, which ends with `code`.
std::string Replay(const std::string& file, const std::string& words, int code) {
  return RunToEnd(Treadle("replay " + words, {file}), code);
}

v1::GenerateRequest RequestOf(int kind) {
  v1::GenerateRequest request;
  request.set_request_id("kind-" + std::to_string(kind));
  request.set_text("Once upon a time, there was one of kind " + std::to_string(kind % 4));
  v1::Sampling& sampling = *request.mutable_sampling();
  sampling.set_temperature(kind % 3 == 0 ? 0.0f : 0.9f);
  sampling.set_seed(static_cast<uint64_t>(kind));
  if (kind % 4 == 1) sampling.set_num_candidates(3);
  if (kind % 5 == 2) sampling.set_repetition_penalty(1.3f);
  request.mutable_stopping()->set_max_new_tokens(kind == 0 ? 300 : 60);
  request.mutable_response()->set_logprobs(kind % 3);
  if (kind == 6) request.mutable_response()->set_prompt_logprobs(1);
  if (kind == 7) {
    request.mutable_constraint()->set_regex("[a-f]{8,40}");
  } else {
    request.mutable_stopping()->set_ignore_eos(true);
  }
  return request;
}

TEST(ReplayBinary, AnIncidentOfAPipelineReplaysInOneProcess) {
  TinyModelOptions tiny;
  tiny.layers = 4;
  tiny.context = 2048;
  const std::string file = OwnFolder() / "incident";
  ServedBinary server(Str(ServedBinary::kGrpcOnly, "--threads 2 --pipeline-parallel 2 ",
                          "--tensor-parallel 2 --wire int8 --kv-dtype int8 --record ", file,
                          " --model ", OwnModel(tiny)));
  const auto ask = [&](int kind, const std::function<void()>& then) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    const auto reader = server.stub().GenerateStream(&context, RequestOf(kind));
    int messages = 0;
    for (v1::GenerateResponse message; reader->Read(&message);) {
      if (++messages == 40 && then) then();
    }
    const grpc::Status status = reader->Finish();
    EXPECT_TRUE(status.ok()) << kind << ": " << status.error_message();
  };
  std::vector<std::thread> clients;
  for (int kind = 1; kind < 9; ++kind) clients.emplace_back([&ask, kind] { ask(kind, {}); });
  ask(0, [&] {
    const std::vector<int> workers = ChildrenOf(server.pid());
    ASSERT_FALSE(workers.empty());
    kill(workers[0], SIGKILL);
  });
  for (std::thread& client : clients) client.join();
  ASSERT_EQ(server.Stop(), 0) << server.output();

  const std::string same = Replay(file, "", 0);
  EXPECT_THAT(same, HasSubstr("IDENTICAL"));
  EXPECT_THAT(same, HasSubstr("epoch 1: "));
  EXPECT_THAT(same, HasSubstr("it ends because the server ended"));
  EXPECT_THAT(Replay(file, "--until-iteration 1:5", 0), HasSubstr("replayed 6 iterations"));
  for (const char* absent : {"99:3", "0:0", "1:1000000", "1000000"}) {
    const std::string refused = Replay(file, Str("--until-iteration ", absent), 2);
    EXPECT_THAT(refused, HasSubstr(Str("--until-iteration is '", absent, "': ")));
    EXPECT_THAT(refused, HasSubstr("1 (iterations 0 to "));
    EXPECT_THAT(refused, Not(HasSubstr("IDENTICAL")));
  }
  const std::string dump = Replay(file, "--dump-request kind-5", 0);
  EXPECT_THAT(dump, HasSubstr("arrived {"));
  EXPECT_THAT(dump, HasSubstr("candidate 2"));
  EXPECT_THAT(dump, HasSubstr("\"reason\":\"length\""));
  EXPECT_THAT(Replay(file, "--dump-request kind-5 --texts", 0), HasSubstr(" 'O"));

  // One token of the second epoch becomes another one.
  const std::string bytes = OwnFolder().Read("incident");
  uint64_t changed_in = 0;
  {
    auto writer = RecordFileWriter::Create(file + "-changed");
    auto reader = RecordReader::Open(bytes);
    ASSERT_TRUE(writer.ok() && reader.ok());
    record::Entry entry;
    for (int results = 0; *reader->Next(entry);) {
      const auto& steps = entry.result().steps();
      const bool token =
          !steps.empty() && steps[0].outputs_size() > 0 && steps[0].outputs(0).has_token();
      if (entry.result().epoch() == 2 && token && ++results == 3) {
        changed_in = entry.result().iteration();
        auto& output = *entry.mutable_result()->mutable_steps(0)->mutable_outputs(0);
        output.set_token(output.token() ^ 1);
      }
      ASSERT_TRUE(writer->Append(entry.SerializeAsString()).ok());
    }
  }
  ASSERT_GT(changed_in, 0u);
  const std::string different = Replay(file + "-changed", "", 1);
  EXPECT_THAT(different,
              HasSubstr(Str("DIFFERENT in iteration ", changed_in, " of epoch 2, request ")));
  EXPECT_THAT(different, HasSubstr("no op is wrong here: the machine that was recorded"));

  // As a kill of the server leaves it: whole entries, and perhaps a part of one.
  OwnFolder().Write("incident-cut", bytes.substr(0, bytes.size() - 1));
  const std::string cut = Replay(OwnFolder() / "incident-cut", "", 3);
  EXPECT_THAT(cut, HasSubstr("IDENTICAL\n"));
  EXPECT_THAT(
      cut,
      HasSubstr("the recording has no end, as after a kill or while the server runs: it goes"));
  EXPECT_THAT(Replay(OwnFolder() / "incident-cut", "--until-iteration 1:5", 0),
              HasSubstr("IDENTICAL\n"));
}

TEST(ReplayBinary, SaysWhatCannotBeReplayed) {
  EXPECT_THAT(Replay(TREADLE_BINARY, "", 2), HasSubstr("no recording, expected what"));
  EXPECT_THAT(Replay("/nonexistent", "", 2), HasSubstr("/nonexistent"));
}

}  // namespace
}  // namespace treadle
