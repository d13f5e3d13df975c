// A model whose files change while a server starts: the numerics key is that of the version which
// computes and answers, or the start ends with an error that names the file. Every change, over
// every step of reading.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "server/cli/open_model.h"
#include "tests/engine/remote/driven_requests.h"
#include "tests/support/assert_ok.h"
#include "tests/support/faults/changing_files.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using testing::HasSubstr;

// What a server makes of a model: its key, what is told of its text side, and answers.
struct Start {
  std::string key;
  std::map<std::string, std::string> texts;  // as a gateway gets them
  float temperature = 0;
  std::unique_ptr<PlanDriver> answers;
};

class OpenChangedModel : public testing::Test {
 protected:
  OpenChangedModel() {
    options_.model = WriteTinyLlamaFolder(folder_.Folder("model"), {.layers = 1}).value();
    folder_.Write("model/config.json",
                  WithRopeTheta(ReadWhole(options_.model + "/config.json"), "10000.0"));
    folder_.Write("model/generation_config.json", R"({"temperature": 0.1})");
    options_.kv_memory = 16 << 20;
    options_.threads = 1;
    options_.pin_threads = false;
    options_.device = DeviceChoice::kCpu;
    options_.max_batch_tokens = 64;
    options_.page_size = 16;
  }

  absl::StatusOr<Start> Open() const {
    TREADLE_ASSIGN_OR_RETURN(OpenedModel opened, OpenModel(options_));
    Start start = {.key = opened.numerics_key,
                   .texts = {},
                   .temperature = opened.served.sampling().temperature,
                   .answers = std::make_unique<PlanDriver>(DriverOptions(1), requests_)};
    TREADLE_ASSIGN_OR_RETURN(start.texts, opened.served.tokenizer_files());
    TREADLE_RETURN_IF_ERROR(EngineClient(std::move(opened.engine)).Run(*start.answers));
    return start;
  }

  void Walk(const std::string& name, const std::string& other) {
    const std::string file = options_.model + "/" + name, bytes = ReadWhole(file);
    ASSERT_EQ(bytes.size(), other.size());
    ASSERT_NE(bytes, other);
    ASSERT_OK_AND_ASSIGN(const Start before, Open());
    ChangeFile(file, FileEvent::kRenamedOver, other);
    ASSERT_OK_AND_ASSIGN(const Start after, Open());
    ASSERT_NE(before.key, after.key);
    ChangeFile(file, FileEvent::kRenamedOver, bytes);
    int steps = 0;
    {
      ChangingFiles counted(file);
      ASSERT_EQ(Open().status(), absl::OkStatus());
      steps = counted.steps();
    }
    int starts = 0;
    for (int step = 0; step < steps; ++step) {
      for (const FileEvent event : kFileEvents) {
        SCOPED_TRACE(Str(name, ": event ", static_cast<int>(event), " before step ", step));
        ChangeFile(file, FileEvent::kRenamedOver, bytes);
        ChangingFiles changing(file);
        changing.Plan(step, event, other);
        const auto found = Open();
        if (!found.ok()) {
          EXPECT_THAT(found.status().message(), HasSubstr(file));
          continue;
        }
        ++starts;
        const Start& version = found->key == after.key ? after : before;
        EXPECT_EQ(found->key, version.key);
        EXPECT_EQ(found->texts, version.texts);
        EXPECT_EQ(found->temperature, version.temperature);
        EXPECT_EQ(DifferentAnswers(*found->answers, *version.answers, requests_), "");
      }
    }
    EXPECT_GT(starts, 0);
    ChangeFile(file, FileEvent::kRenamedOver, bytes);
  }

  const TestFolder folder_;
  const std::vector<PlanDriver::DrivenRequest> requests_ = SomeRequests(3, 2);
  ServeOptions options_;
};

TEST_F(OpenChangedModel, TheKeyIsThatOfWhatComputesAndAnswers) {
  const auto with = [&](const char* name, const std::string& from, const std::string& to) {
    std::string text = ReadWhole(options_.model + "/" + name);
    const size_t at = text.find(from);
    TREADLE_CHECK(at != text.npos);
    return text.replace(at, from.size(), to);
  };
  Walk("config.json", with("config.json", "10000.0", "40000.0"));
  Walk("generation_config.json", R"({"temperature": 0.2})");
  Walk("tokenizer_config.json", with("tokenizer_config.json", "message", "massage"));
  std::string weights = ReadWhole(options_.model + "/model.safetensors");
  for (size_t i = weights.size() / 2; i < weights.size(); ++i) {
    weights[i] = static_cast<char>(weights[i] ^ 1);
  }
  Walk("model.safetensors", weights);
}

}  // namespace
}  // namespace treadle
