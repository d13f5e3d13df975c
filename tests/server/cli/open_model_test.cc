// Which of a server's options decide the numerics key, and what does not.
#include "server/cli/open_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "kernels/cpu/cpu_backend.h"
#include "tests/support/assert_ok.h"
#include "tests/support/tiny_model.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

class NumericsKey : public testing::Test {
 protected:
  NumericsKey() { std::filesystem::create_directories(folder_); }
  ~NumericsKey() override { std::filesystem::remove_all(folder_); }

  std::string Write(uint64_t seed = 1) const {
    TinyModelOptions options;
    options.seed = seed;
    options.format = "q8_0";
    return *WriteTinyLlamaGguf(folder_, options);
  }
  // `system_fingerprint` of a server with these options.
  std::string Of(const std::function<void(ServeOptions&)>& change = [](ServeOptions&) {}) const {
    ServeOptions options;
    options.model = folder_ + "/tiny-llama.gguf";
    options.kv_memory = 16 << 20;
    options.threads = 1;
    options.pin_threads = false;
    options.device = DeviceChoice::kCpu;
    change(options);
    const auto opened = OpenModel(options);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? opened->served.fingerprint : "";
  }

  const std::string folder_ = testing::TempDir() + "/numerics-key-" + std::to_string(getpid());
};

TEST_F(NumericsKey, IsOfTheModelsContent) {
  const std::string path = Write();
  const std::string key = Of();
  const auto size = std::filesystem::file_size(path);
  Write(/*seed=*/2);
  ASSERT_EQ(std::filesystem::file_size(path), size);
  EXPECT_NE(Of(), key);
  Write();
  EXPECT_EQ(Of(), key);
}

TEST_F(NumericsKey, WhatDoesNotChangeBitsIsNotInIt) {
  const std::string path = Write();
  const std::string key = Of();
  using O = ServeOptions;
  const std::function<void(O&)> same[] = {
      [](O& o) { o.threads = 2; },
      [](O& o) { o.max_batch_size = 3; },
      [](O& o) { o.max_batch_tokens = 100; },
      [](O& o) { o.kv_memory = 8 << 20; },
      [](O& o) { o.page_size = 64; },
      [](O& o) { o.max_context = 128; },
      [](O& o) { o.engine_depth = 1; },
      [](O& o) { o.dtype = DType::kF16; },  // of GPUs
      [](O& o) { o.compute = kCpuAuto; },
      [&](O& o) {
        o.model = path + "-renamed.gguf";
        std::filesystem::copy_file(path, o.model);
      },
  };
  for (size_t i = 0; i < std::size(same); ++i) EXPECT_EQ(Of(same[i]), key) << i;
}

TEST_F(NumericsKey, WhatTheAuthorsRecommendToSampleWithIsInIt) {
  ServeOptions options;
  options.model = *WriteTinyLlamaFolder(folder_, {});
  options.kv_memory = 16 << 20;
  options.threads = 1;
  options.pin_threads = false;
  options.device = DeviceChoice::kCpu;
  const auto open = [&] { return OpenModel(options); };
  const auto recommend = [&](const std::string& text) {
    std::ofstream(options.model + "/generation_config.json") << text;
  };
  ASSERT_OK_AND_ASSIGN(const auto plain, open());
  EXPECT_FALSE(plain.served.sampling_defaults.has_value());
  recommend(R"({"temperature": 0.5, "top_k": 3})");
  ASSERT_OK_AND_ASSIGN(const auto recommended, open());
  EXPECT_EQ(recommended.served.sampling().temperature, 0.5f);
  EXPECT_EQ(recommended.served.sampling().top_k, 3);
  EXPECT_NE(recommended.served.fingerprint, plain.served.fingerprint);
  recommend(R"({"temperature": 0.5, "top_p": 7})");
  EXPECT_THAT(std::string(open().status().message()),
              testing::EndsWith("generation_config.json: top_p is 7, expected (0, 1]; "
                                "--generation-config none does not read it"));
  options.generation_config = GenerationConfig::kNone;
  ASSERT_OK_AND_ASSIGN(const auto ignored, open());
  EXPECT_FALSE(ignored.served.sampling_defaults.has_value());
  // The same files, sampled from in another way.
  recommend(R"({"temperature": 0.5, "top_k": 3})");
  EXPECT_NE(open()->served.fingerprint, recommended.served.fingerprint);
}

TEST_F(NumericsKey, ADraftModelChangesNothingAndHasTheSameVocabulary) {
  const std::string path = Write();
  const std::string key = Of();
  const auto draft = [](const std::string& model) {
    return [model](ServeOptions& o) {
      o.speculate = Speculate::kDraft;
      o.draft_model = model;
    };
  };
  EXPECT_EQ(Of(draft(path)), key);
  ServeOptions options;
  options.model = path;
  const auto refusal = [&](const std::string& model) {
    draft(model)(options);
    return std::string(CheckModel(options).status().message());
  };
  EXPECT_THAT(refusal(path + "-none"), testing::StartsWith("--speculate draft: "));
  const std::string other = folder_ + "/other";
  std::filesystem::create_directories(other);
  TinyModelOptions without;
  without.tokenizer = false;
  EXPECT_THAT(refusal(*WriteTinyLlamaGguf(other, without)),
              testing::HasSubstr("only the served model has a tokenizer; expected the vocabulary"));
  const std::string folder = *WriteTinyLlamaFolder(other, {});
  std::string text = ReadWhole(folder + "/tokenizer.json");
  for (size_t at; (at = text.find("<|im_start|>")) != text.npos;) text.replace(at, 12, "<|begin|>");
  std::ofstream(folder + "/tokenizer.json") << text;
  EXPECT_THAT(refusal(folder), testing::HasSubstr("is '<|begin|>', the served model's "
                                                  "'<|im_start|>'; expected the vocabulary of"));
}

// Refused before anything is loaded or started, with what would fit.
TEST_F(NumericsKey, ACacheThatIsLargerThanTheMemoryIsRefused) {
  ServeOptions options;
  options.model = Write();
  options.device = DeviceChoice::kCpu;
  options.kv_memory = int64_t{500} << 40;
  for (const int64_t stages : {1, 2}) {
    options.pipeline_parallel = stages;
    const absl::Status refused = OpenModel(options).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    const std::string message(refused.message());
    EXPECT_THAT(message, testing::StartsWith(
                             stages == 1 ? "--kv-memory is 524288000M, this "
                                         : "--kv-memory is 524288000M in each of 2 stages, "));
    EXPECT_THAT(message, testing::ContainsRegex("expected at most [0-9]+M, or auto$"));
  }
}

TEST_F(NumericsKey, WhatChangesBitsIsInIt) {
  Write();
  std::vector<std::string> keys = {Of()};
  using O = ServeOptions;
  const std::function<void(O&)> other[] = {
      [](O& o) { o.kv_dtype = DType::kF32; },
      [](O& o) { o.kv_dtype = DType::kI8; },
      [](O& o) { o.compute = ComputeMode::kExact; },
      [](O& o) { o.compute = ComputeMode::kInt8; },
      [](O& o) { o.tensor_parallel = 2; },
      [](O& o) { o.outlier_threshold = 4; },
      [](O& o) { o.weights = *WeightPlan::Parse("nf4"); },
  };
  for (const auto& change : other) keys.push_back(Of(change));
  std::ranges::sort(keys);
  EXPECT_EQ(std::ranges::unique(keys).size(), 0u);
}

}  // namespace
}  // namespace treadle
