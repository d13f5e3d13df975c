// Training: losses against peft and PyTorch (tests/oracles/make_training_oracles.py), resumption
// and threads bit for bit, every weight format, and the folder that is written.
//
// Losses of 50 steps are within 1 % of PyTorch's: both are float32, and rounding is what differs.
// The gradient of a quantized base is checked by the loss' own fall along it: 1e-2 times the norm,
// to within 5 % for what curves. Rounding of a float32 loss (6e-8 * 6) is far below.
#include "training/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>

#include "base/mapped_file.h"
#include "kernels/formats/quantize.h"
#include "models/adapters/adapter_file.h"
#include "models/checkpoints/huggingface/safetensors.h"
#include "tests/support/assert_ok.h"
#include "tests/support/identifier.h"
#include "tests/support/oracles.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr int64_t kBatch = 2, kLength = 24;

std::string ModelPath(const std::string& name) { return TREADLE_TESTDATA "/models/" + name; }

// The sequences of the oracles' script, of which all tokens count.
std::vector<Example> RuledExamples(int64_t steps, int64_t vocab) {
  std::vector<Example> examples;
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t b = 0; b < kBatch; ++b) {
      Example example;
      for (int64_t i = 0; i < kLength - 3 * b; ++i) {
        example.tokens.push_back(
            static_cast<int32_t>((17 * (step * kBatch + b) + 5 * i + i * i * (b + 1)) % vocab));
      }
      example.counts.assign(example.tokens.size(), true);
      examples.push_back(std::move(example));
    }
  }
  return examples;
}

TrainingOptions SmallRun(int64_t steps) {
  TrainingOptions options;
  options.lora = {.rank = 4, .alpha = 8};
  options.optimizer = {.learning_rate = 0.02, .weight_decay = 0.01, .warmup = 5, .steps = steps};
  options.batch_size = kBatch;
  options.max_length = kLength;
  options.threads = 1;
  return options;
}

std::unique_ptr<Trainer> MakeTrainer(const std::string& path, const TrainingOptions& options,
                                     std::vector<Example> examples = {}) {
  const auto checkpoint = Checkpoint::Open(path).value();
  if (examples.empty()) {
    examples = RuledExamples(options.optimizer.steps, checkpoint->config().vocab);
  }
  auto trainer = Trainer::Create(*checkpoint, std::move(examples), options, OwnFolder().path());
  EXPECT_TRUE(trainer.ok()) << trainer.status();
  TREADLE_CHECK(trainer.ok());
  return *std::move(trainer);
}

std::vector<float> ValuesAfter(Trainer& trainer, int64_t steps) {
  for (int64_t i = 0; i < steps; ++i) EXPECT_TRUE(trainer.Step().ok());
  const auto values = trainer.adapter().values();
  return {values.begin(), values.end()};
}

class LossTest : public testing::TestWithParam<Json> {};
INSTANTIATE_TEST_SUITE_P(
    Models, LossTest,
    testing::ValuesIn(ReadOracles("training_oracles.json")["training"].get<std::vector<Json>>()),
    [](const auto& info) { return Identifier(info.param["model"].template get<std::string>()); });

TEST_P(LossTest, IsPytorchs) {
  const auto losses = GetParam()["losses"].get<std::vector<double>>();
  TrainingOptions options = SmallRun(std::ssize(losses));
  options.keep_order = true;
  const auto trainer = MakeTrainer(ModelPath(GetParam()["model"]), options);
  TrainedAdapter& adapter = trainer->adapter();
  for (const TrainedAdapter::Module& module : adapter.modules()) {
    const int64_t k = module.update.k;
    for (int64_t i = 0; i < options.lora.rank * k; ++i) {
      const double wave = std::sin(static_cast<double>(i) * 0.7 + 1);
      adapter.values()[module.begin + static_cast<size_t>(i)] =
          static_cast<float>(wave / std::sqrt(static_cast<double>(k)));
    }
  }
  adapter.Refresh();
  for (size_t step = 0; step < losses.size(); ++step) {
    ASSERT_OK_AND_ASSIGN(const auto report, trainer->Step());
    EXPECT_NEAR(report.loss, losses[step], 0.01 * losses[step]) << "step " << step;
  }
}

// A run of a soft prompt of 6 rows; no A and B.
TrainingOptions SoftPromptRun(int64_t steps) {
  TrainingOptions options = SmallRun(steps);
  options.lora.rank = 0;
  options.soft_prompt.virtual_tokens = 6;
  options.optimizer.learning_rate = 0.05;
  options.keep_order = true;
  return options;
}

class SoftPromptTest : public testing::TestWithParam<Json> {};
INSTANTIATE_TEST_SUITE_P(Models, SoftPromptTest,
                         testing::ValuesIn(ReadOracles("training_oracles.json")["soft_prompts"]
                                               .get<std::vector<Json>>()),
                         [](const auto& info) {
                           return Identifier(info.param["model"].template get<std::string>());
                         });

// The gradient is within 1e-5 of float64's, by the largest of its numbers.
TEST_P(SoftPromptTest, HasPeftsGradientAndLosses) {
  const auto losses = GetParam()["losses"].get<std::vector<double>>();
  const auto trainer =
      MakeTrainer(ModelPath(GetParam()["model"]), SoftPromptRun(std::ssize(losses)));
  TrainedAdapter& adapter = trainer->adapter();
  for (size_t i = 0; i < adapter.values().size(); ++i) {
    adapter.values()[i] = static_cast<float>(std::sin(static_cast<double>(i) * 0.7 + 1));
  }
  adapter.Refresh();
  for (size_t step = 0; step < losses.size(); ++step) {
    ASSERT_OK_AND_ASSIGN(const auto report, trainer->Step());
    EXPECT_NEAR(report.loss, losses[step], 0.01 * losses[step]) << "step " << step;
    if (step > 0) continue;
    const std::vector<float> gradient = Floats(GetParam()["gradient"]);
    ASSERT_EQ(gradient.size(), adapter.gradients().size());
    double largest = 0, apart = 0;
    for (size_t i = 0; i < gradient.size(); ++i) {
      largest = std::max(largest, std::abs(double{gradient[i]}));
      apart = std::max(apart, std::abs(double{gradient[i]} - double{adapter.gradients()[i]}));
    }
    EXPECT_LE(apart, 1e-5 * largest);
    EXPECT_NEAR(report.loss, GetParam()["loss"].get<double>(), 1e-5 * report.loss);
  }
}

// Rows of the vocabulary, as PEFT's SAMPLE_VOCAB and TEXT take them.
TEST(Trainer, ASoftPromptBeginsAsTokens) {
  const auto begin = [](const std::string& model, std::vector<int32_t> ids, uint64_t seed) {
    TrainingOptions options = SoftPromptRun(1);
    options.soft_prompt.begin = std::move(ids);
    options.seed = seed;
    const auto trainer = MakeTrainer(ModelPath(model), options);
    const auto values = trainer->adapter().values();
    return std::vector<float>(values.begin(), values.end());
  };
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(ModelPath("gemma3")));
  const std::vector<float> table = DecodeVector(*checkpoint->Find("model.embed_tokens.weight"));
  const auto hidden = static_cast<size_t>(checkpoint->config().hidden);
  const std::vector<float> text = begin("gemma3", {7, 9, 11, 130}, 0);
  for (size_t row = 0; row < 6; ++row) {
    const size_t token = std::vector<size_t>{7, 9, 11, 130, 7, 9}[row];
    for (size_t i = 0; i < hidden; ++i) {
      EXPECT_NEAR(text[row * hidden + i],
                  table[token * hidden + i] * std::sqrt(static_cast<float>(hidden)), 1e-5f);
    }
  }
  const std::vector<float> drawn = begin("llama-grouped", {}, 3);
  EXPECT_EQ(drawn, begin("llama-grouped", {}, 3));
  EXPECT_NE(drawn, begin("llama-grouped", {}, 4));
}

TEST(Trainer, ASoftPromptIsWrittenForPeftAndServed) {
  const auto trainer = MakeTrainer(ModelPath("granite"), SoftPromptRun(2));
  const std::vector<float> values = ValuesAfter(*trainer, 2);
  const std::string folder = OwnFolder().Folder("prompt");
  ASSERT_TRUE(trainer->adapter().Write(folder, "base").ok());
  const auto checkpoint = Checkpoint::Open(ModelPath("granite"));
  ASSERT_OK_AND_ASSIGN(const auto read, AdapterFile::Open(folder, (*checkpoint)->config()));
  EXPECT_EQ(read->virtual_tokens(), 6);
  EXPECT_EQ(DecodeVector(read->soft_prompt()), values);
}

// A uniform in +-1 / sqrt(k): the mean of k A^2 is 1/3, for 5,000 numbers to within 5 %. B zeros.
TEST(Trainer, BeginsAsPeftDoes) {
  TrainingOptions options = SmallRun(1);
  options.lora.rank = 8;
  const auto trainer = MakeTrainer(ModelPath("llama-grouped"), options);
  double squares = 0, count = 0;
  for (const TrainedAdapter::Module& module : trainer->adapter().modules()) {
    const LowRankUpdate& u = module.update;
    for (int64_t i = 0; i < options.lora.rank * u.k; ++i) {
      const double share = double{u.a[i]} * u.a[i] * static_cast<double>(u.k);
      EXPECT_LE(share, 1.0001);
      squares += share;
      ++count;
    }
    for (int64_t i = 0; i < options.lora.rank * u.n; ++i) EXPECT_EQ(u.b[i], 0);
  }
  EXPECT_GT(count, 4000);
  EXPECT_NEAR(squares / count, 1 / 3.0, 0.05 / 3);
}

TEST(Trainer, GoesOnBitForBitFromACheckpoint) {
  const TrainingOptions options = SmallRun(10);
  const std::string file = OwnFolder() / "checkpoint";
  const std::string model = ModelPath("llama-grouped");
  const std::vector<float> whole = ValuesAfter(*MakeTrainer(model, options), 10);
  const auto first = MakeTrainer(model, options);
  const std::vector<float> half = ValuesAfter(*first, 5);
  EXPECT_NE(half, whole);
  ASSERT_TRUE(first->WriteCheckpoint(file).ok());
  ASSERT_TRUE(first->WriteCheckpoint(file).ok()) << "over the one that is there";
  const auto second = MakeTrainer(model, options);
  ASSERT_TRUE(second->Resume(file).ok());
  EXPECT_EQ(second->steps_done(), 5);
  EXPECT_EQ(ValuesAfter(*second, 5), whole);

  const auto prompt = MakeTrainer(model, SoftPromptRun(10));
  const std::vector<float> prompts = ValuesAfter(*MakeTrainer(model, SoftPromptRun(10)), 10);
  ValuesAfter(*prompt, 5);
  const std::string other_file = OwnFolder() / "checkpoint-of-a-prompt";
  ASSERT_TRUE(prompt->WriteCheckpoint(other_file).ok());
  const auto resumed = MakeTrainer(model, SoftPromptRun(10));
  ASSERT_TRUE(resumed->Resume(other_file).ok());
  EXPECT_EQ(ValuesAfter(*resumed, 5), prompts);

  TrainingOptions other = options;
  other.lora.alpha = 9;
  const absl::Status refused = MakeTrainer(model, other)->Resume(file);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another lora-alpha: 8.0, now it is 9.0"));
  EXPECT_TRUE(absl::IsNotFound(second->Resume(file + "-that-is-not-there")));
}

// Factors of 16 * 256 numbers, whose moments are 8-bit.
TEST(Trainer, LearnsAsFastWithMomentsOfEightBits) {
  TinyModelOptions tiny;
  tiny.hidden = tiny.ffn_hidden = 256;
  ASSERT_OK_AND_ASSIGN(const auto model, WriteTinyLlamaGguf(OwnFolder().Folder("eight"), tiny));
  TrainingOptions options = SmallRun(50);
  options.lora.rank = 16;
  options.optimizer.learning_rate = 0.002;
  std::vector<double> losses;
  for (const bool eight_bit : {false, true}) {
    options.optimizer.eight_bit = eight_bit;
    const auto trainer = MakeTrainer(model, options, RuledExamples(2, 64));  // again and again
    const std::string file = OwnFolder() / "eight-checkpoint";
    for (int64_t step = 0; step < 50; ++step) {
      ASSERT_OK_AND_ASSIGN(const auto report, trainer->Step());
      if (!eight_bit) {
        losses.push_back(report.loss);
      } else {
        EXPECT_NEAR(report.loss, losses[static_cast<size_t>(step)], 0.01 * report.loss) << step;
      }
      if (step == 24) ASSERT_TRUE(trainer->WriteCheckpoint(file).ok());
    }
    const auto resumed = MakeTrainer(model, options, RuledExamples(2, 64));
    ASSERT_TRUE(resumed->Resume(file).ok());
    const auto values = trainer->adapter().values();
    EXPECT_EQ(ValuesAfter(*resumed, 25), std::vector<float>(values.begin(), values.end()));
  }
  EXPECT_LT(losses.back(), 0.95 * losses.front());
  options.optimizer.eight_bit = false;
  EXPECT_THAT(
      std::string(MakeTrainer(model, options)->Resume(OwnFolder() / "eight-checkpoint").message()),
      HasSubstr("another optimizer: \"adamw8bit\", now it is \"adamw\""));
}

TEST(Trainer, HasTheSameBitsOnAnyNumberOfThreads) {
  TinyModelOptions tiny;
  tiny.format = "q4_1";
  ASSERT_OK_AND_ASSIGN(const auto model, WriteTinyLlamaGguf(OwnFolder().Folder("threads"), tiny));
  TrainingOptions options = SmallRun(3);
  options.accumulation = 2;
  const std::vector<float> one = ValuesAfter(*MakeTrainer(model, options), 3);
  options.threads = 3;
  EXPECT_EQ(ValuesAfter(*MakeTrainer(model, options), 3), one);
  options.seed = 1;
  EXPECT_NE(ValuesAfter(*MakeTrainer(model, options), 3), one);
}

TEST(Trainer, HasTheSameBitsOnEveryInstructionSet) {
  const std::string model = ModelPath("gemma3");
  std::map<std::string_view, std::vector<float>> values;
  for (const CpuIsa isa : SupportedIsas()) {
    setenv("TREADLE_CPU_ISA", std::string(Name(isa)).c_str(), 1);
    values[Name(isa)] = ValuesAfter(*MakeTrainer(model, SmallRun(3)), 3);
  }
  unsetenv("TREADLE_CPU_ISA");
  for (const auto& [name, of] : values) EXPECT_EQ(of, values.begin()->second) << name;
}

// Batches whose gradients are added up are one batch.
TEST(Trainer, AccumulatesTheGradientOfAllBatches) {
  TrainingOptions options = SmallRun(4);
  const std::string model = ModelPath("qwen3");
  const std::vector<float> together = ValuesAfter(*MakeTrainer(model, options), 4);
  options.batch_size = 1;
  options.accumulation = kBatch;
  const std::vector<float> apart =
      ValuesAfter(*MakeTrainer(model, options, RuledExamples(4, 131)), 4);
  ASSERT_EQ(apart.size(), together.size());
  // Gradients differ by the order of a float32 sum; Adam's first steps divide them by their size.
  for (size_t i = 0; i < apart.size(); ++i) EXPECT_NEAR(apart[i], together[i], 2e-3) << i;
}

// Loss falls along the gradient as far as its norm says. distance: of the step that shows it.
void ExpectOwnGradient(const std::string& path, TrainingOptions options, double distance = 1e-2) {
  options.optimizer.learning_rate = options.optimizer.weight_decay = 0;
  const auto trainer = MakeTrainer(path, options);
  TrainedAdapter& adapter = trainer->adapter();
  for (const TrainedAdapter::Module& module : adapter.modules()) {  // B is not zeros
    const int64_t a = options.lora.rank * module.update.k;
    for (int64_t i = 0; i < options.lora.rank * module.update.n; ++i) {
      adapter.values()[module.begin + static_cast<size_t>(a + i)] =
          0.02f * std::sin(static_cast<float>(i));
    }
  }
  adapter.Refresh();
  ASSERT_OK_AND_ASSIGN(const auto before, trainer->Step());
  const double norm = before.gradient_norm, step = distance / norm;
  for (size_t i = 0; i < adapter.values().size(); ++i) {
    adapter.values()[i] -= static_cast<float>(step) * adapter.gradients()[i];
  }
  adapter.Refresh();
  ASSERT_OK_AND_ASSIGN(const auto after, trainer->Step());
  EXPECT_NEAR((before.loss - after.loss) / (step * norm * norm), 1, 0.05) << norm;
}

class BaseFormatTest : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Formats, BaseFormatTest,
                         testing::Values("keep", "bf16", "f16", "q8_0", "q4_1", "q4_k", "q6_k",
                                         "iq4_nl", "nf4", "nf4-dq:128", "int8", "fp8",
                                         "kbit-int4:64"),
                         [](const auto& info) { return Identifier(info.param); });

TEST_P(BaseFormatTest, HasTheGradientOfItsOwnLoss) {
  TinyModelOptions tiny;
  tiny.hidden = tiny.ffn_hidden = 256;  // whole blocks of any format
  ASSERT_OK_AND_ASSIGN(const auto path,
                       WriteTinyLlamaGguf(OwnFolder().Folder(Identifier(GetParam())), tiny));
  TrainingOptions options = SmallRun(1);
  options.weights = *WeightPlan::Parse(GetParam());
  ExpectOwnGradient(path, options);
}

// Every family that is let in.
TEST(Trainer, HasTheGradientOfEachFamily) {
  std::set<std::string> families, prompts;
  for (const auto& entry : std::filesystem::directory_iterator(ModelPath(""))) {
    if (!entry.is_directory()) continue;
    ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(entry.path()));
    if (!CheckTrainable(*checkpoint, {}).ok()) continue;
    SCOPED_TRACE(entry.path());
    families.insert(checkpoint->config().architecture);
    ExpectOwnGradient(entry.path(), SmallRun(1));
  }
  for (const auto& entry : std::filesystem::directory_iterator(ModelPath(""))) {
    if (!entry.is_directory()) continue;
    const auto checkpoint = Checkpoint::Open(entry.path());
    if (!CheckTrainable(**checkpoint, {.rank = 0}).ok()) continue;
    SCOPED_TRACE(entry.path());
    prompts.insert((*checkpoint)->config().architecture);
    ExpectOwnGradient(entry.path(), SoftPromptRun(1), 1e-3);  // embeddings are small, and curve
  }
  TrainingOptions apart = SmallRun(1);
  apart.lora.targets = "o,down";  // matrices that are not fused
  ExpectOwnGradient(ModelPath("phi3"), apart);
  EXPECT_GE(families.size(), 12u) << testing::PrintToString(families);
  // Fused matrices are in nobody's way.
  EXPECT_TRUE(std::ranges::includes(prompts, families));
  EXPECT_TRUE(prompts.contains("phi3") && prompts.contains("glm4"))
      << testing::PrintToString(prompts);
}

TEST(Trainer, WritesTheFolderThatPeftReads) {
  // Rows of Q and K are in pairs in the .gguf file, in halves in folders.
  const TinyModelOptions tiny;
  const auto gguf = WriteTinyLlamaGguf(OwnFolder().Folder("gguf"), tiny);
  const auto folder = WriteTinyLlamaFolder(OwnFolder().Folder("folder"), tiny);
  ASSERT_TRUE(gguf.ok() && folder.ok());
  std::string written[2];
  for (const auto& [path, to] : {std::pair(*gguf, &written[0]), std::pair(*folder, &written[1])}) {
    const auto trainer = MakeTrainer(path, SmallRun(2));
    ValuesAfter(*trainer, 2);
    const std::string out = OwnFolder().Folder(path == *gguf ? "from-gguf" : "from-folder");
    ASSERT_TRUE(trainer->adapter().Write(out, "base").ok());
    EXPECT_FALSE(trainer->adapter().Write(out, "base").ok()) << "over what is there";
    *to = ReadWhole(out + "/adapter_model.safetensors");
    const Json json = Json::parse(std::ifstream(out + "/adapter_config.json"));
    EXPECT_EQ(json["r"], 4);
    EXPECT_EQ(json["lora_alpha"], 8);
    EXPECT_EQ(json["target_modules"],
              Json({"down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"}));
    const auto mapped = MappedFile::Open(out + "/adapter_model.safetensors");
    ASSERT_OK_AND_ASSIGN(const auto entries, ReadSafetensors(**mapped));
    EXPECT_EQ(entries.size(), 2u * 7u * 2u);
    const auto found =
        std::ranges::find(entries, "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight",
                          &SafetensorsEntry::name);
    ASSERT_NE(found, entries.end());
    EXPECT_EQ(found->shape, (std::vector<int64_t>{32, 4}));
  }
  EXPECT_EQ(written[0], written[1]);
}

TEST(Trainer, RefusesByName) {
  const auto refusal = [](const std::string& model, const std::string& targets = "q,v") {
    const auto checkpoint = Checkpoint::Open(ModelPath(model)).value();
    return std::string(CheckTrainable(*checkpoint, {.targets = targets}).message());
  };
  EXPECT_EQ(refusal("qwen3"), "");
  EXPECT_THAT(refusal("gpt2"), HasSubstr("gpt2 models, which have a layer without gradients"));
  EXPECT_THAT(refusal("mixtral"), HasSubstr("which have experts"));
  EXPECT_THAT(refusal("phi3"), HasSubstr("which have fused matrices"));
  EXPECT_THAT(refusal("apertus"), HasSubstr("an activation without gradients"));
  EXPECT_THAT(refusal("qwen35"), HasSubstr("layers that keep a state"));
  EXPECT_THAT(refusal("qwen3", "q,w"), HasSubstr("'w' is none, expected some of q,k,v,o,gate"));
}

}  // namespace
}  // namespace treadle
