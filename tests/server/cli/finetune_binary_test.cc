// `treadle finetune` as users run it: an adapter, a run that goes on after a signal as if there had
// been none, and bad input that is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

#include "base/status.h"
#include "tests/server/cli/served_binary.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using testing::HasSubstr;

constexpr char kLine[] = "{\"prompt\": \"a b\", \"completion\": \" c d e\"}\n";

std::vector<std::string> Finetune(const std::string& output, const std::string& words = "",
                                  const std::string& kind = "--lora-rank 4 ") {
  TinyModelOptions tiny;
  tiny.context = 512;  // the default of --max-length
  return Treadle(Str("finetune --model ", OwnModel(tiny), " --data ", OwnFolder() / "data.jsonl",
                     " --output ", OwnFolder() / output, " --batch-size 1 ", "--threads 1 ", kind,
                     words));
}

TEST(FinetuneBinary, GoesOnAfterASignal) {
  OwnFolder().Write("data.jsonl", std::string(kLine) + kLine);
  const std::string steps = "--steps 200 ";
  EXPECT_THAT(RunToEnd(Finetune("whole", steps)), HasSubstr("step 200/200, loss "));
  ChildProcess first(Finetune("parts", steps + "--checkpoint-every 0"));
  ASSERT_NE(first.WaitForLine("step 3/200"), "");
  first.Signal(SIGINT);
  ASSERT_EQ(first.Wait(), 1) << first.output();
  EXPECT_THAT(first.output(), HasSubstr("interrupted; --resume goes on from step "));
  EXPECT_THAT(RunToEnd(Finetune("parts", steps), 2), HasSubstr("has a checkpoint"));
  EXPECT_THAT(RunToEnd(Finetune("parts", "--steps 201 --resume"), 2),
              HasSubstr("another steps: 200, now it is 201"));
  RunToEnd(Finetune("parts", steps + "--resume"));
  const std::string file = "/adapter_model.safetensors";
  EXPECT_EQ(OwnFolder().Read("parts" + file), OwnFolder().Read("whole" + file));
  EXPECT_FALSE(std::filesystem::exists(OwnFolder() / "parts/checkpoint.safetensors"));
  EXPECT_THAT(RunToEnd(Finetune("whole", steps), 2), HasSubstr("has an adapter already"));
}

TEST(FinetuneBinary, TrainsASoftPrompt) {
  OwnFolder().Write("data.jsonl", kLine);
  const std::string steps = "--steps 3 --max-length 64 --learning-rate 0.1 --optimizer adamw8bit ";
  RunToEnd(Finetune("drawn", steps, "--soft-prompt 4 "));
  RunToEnd(Finetune("text", steps + "--soft-prompt-text ab", "--soft-prompt 4 "));
  for (const char* const name : {"drawn", "text"}) {
    EXPECT_THAT(OwnFolder().Read(Str(name, "/adapter_config.json")),
                HasSubstr("\"num_virtual_tokens\": 4"));
  }
  EXPECT_NE(OwnFolder().Read("drawn/adapter_model.safetensors"),
            OwnFolder().Read("text/adapter_model.safetensors"));
  EXPECT_THAT(RunToEnd(Finetune("wrong", "--soft-prompt 4"), 2),
              testing::AllOf(HasSubstr("--soft-prompt"), HasSubstr("--lora-rank")));
  EXPECT_THAT(RunToEnd(Finetune("wrong", "--soft-prompt-text x"), 2),
              testing::AllOf(HasSubstr("--soft-prompt-text"), HasSubstr("--soft-prompt")));
  EXPECT_THAT(RunToEnd(Finetune("wrong", "", "--soft-prompt 4 "), 2),
              HasSubstr("--max-length is 512, expected at most 508, the model's context without "
                        "--soft-prompt"));
}

// Workers that a server has, with a secret: the same adapter as without them.
TEST(FinetuneBinary, TrainsThroughTheWorkersOfAServer) {
  OwnFolder().Write("data.jsonl", std::string(kLine) + kLine);
  RunToEnd(Finetune("here", "--steps 5"));
  const std::string model = Finetune("")[3];
  const std::string secret =
      Str(" --control-secret-file ", OwnFolder().Write("secret", "sixteen characters\n"));
  const WorkerBinary first(Str("--model ", model, secret)), second(Str("--model ", model, secret));
  const std::string workers = Str("--workers ", first.address(), ",", second.address());
  const ServedBinary server(Str("--model ", model, " ", workers, secret, " --max-batch-size 2 ",
                                ServedBinary::kGrpcOnly));
  RunToEnd(Finetune("through", Str("--steps 5 ", workers, secret)));
  const std::string file = "/adapter_model.safetensors";
  EXPECT_NE(OwnFolder().Read("here" + file), "");
  EXPECT_EQ(OwnFolder().Read("through" + file), OwnFolder().Read("here" + file));
  const std::string prompt = "--steps 3 --max-length 64 --learning-rate 0.1 ";
  RunToEnd(Finetune("prompt", prompt, "--soft-prompt 4 "));
  RunToEnd(Finetune("prompt-through", Str(prompt, workers, secret), "--soft-prompt 4 "));
  EXPECT_NE(OwnFolder().Read("prompt" + file), "");
  EXPECT_EQ(OwnFolder().Read("prompt-through" + file), OwnFolder().Read("prompt" + file));
  EXPECT_THAT(RunToEnd(Finetune("wrong", workers), 1),
              HasSubstr(Str("worker ", first.address(), ": the worker wants proof")));
}

TEST(FinetuneBinary, NamesWhatIsWrong) {
  OwnFolder().Write("data.jsonl", std::string(kLine) + "{\"text\": 1}\n");
  EXPECT_THAT(RunToEnd(Finetune("wrong"), 2),
              HasSubstr("data.jsonl:2: \"text\" is not there, or no string"));
  EXPECT_THAT(RunToEnd(Finetune("wrong", "--target-modules q,norm"), 2),
              HasSubstr("'norm' is none, expected some of q,k,v,o,gate,up,down"));
  OwnFolder().Write("data.jsonl", kLine);
  EXPECT_THAT(RunToEnd(Finetune("wrong", "--max-length 4096"), 2),
              HasSubstr("--max-length is 4096, expected at most 512, the model's context"));
  EXPECT_THAT(RunToEnd(Finetune("wrong", "--resume"), 2), HasSubstr("checkpoint.safetensors"));
  EXPECT_THAT(RunToEnd(Finetune("wrong", "--workers here"), 2), HasSubstr("'here'"));
  EXPECT_THAT(RunToEnd(Finetune("wrong", "--worker-wait 1"), 2), HasSubstr("requires --workers"));
}

}  // namespace
}  // namespace treadle
