// treadle perplexity and treadle-bench accuracy as users meet them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/status.h"
#include "tests/server/cli/child_process.h"
#include "tests/support/default_model.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using testing::HasSubstr;

class QualityCommand : public testing::Test {
 protected:
  std::string File(const std::string& name, const std::string& bytes) const {
    return folder_.Write(name, bytes);
  }
  // A real text.
  static std::string Licence() { return std::string(TREADLE_TESTDATA) + "/../../LICENSE"; }

  struct Result {
    int code;
    std::string output;  // both streams
  };
  static Result Run(std::vector<std::string> arguments) {
    const bool accuracy = arguments[0] == "accuracy";
    arguments.insert(arguments.begin(), accuracy ? TREADLE_BENCH_BINARY : TREADLE_BINARY);
    ChildProcess child(arguments);
    const int code = child.Wait();
    return {code, child.output()};
  }
  static void ExpectRefused(const std::vector<std::string>& arguments, const std::string& message) {
    const Result result = Run(arguments);
    EXPECT_EQ(result.code, 2) << result.output;
    EXPECT_THAT(result.output, HasSubstr(message));
  }
  static nlohmann::json LastLine(const std::string& output) {
    const size_t end = output.find_last_not_of('\n') + 1;
    const size_t begin = output.rfind('\n', end - 1) + 1;
    return nlohmann::json::parse(output.substr(begin, end - begin));
  }

  const TestFolder folder_;
};

TEST_F(QualityCommand, WrongUseSaysWhatIsWrong) {
  const std::string small = std::string(TREADLE_TESTDATA) + "/models/llama-grouped";
  ExpectRefused({"perplexity"}, "model is required");
  ExpectRefused({"perplexity", small, "--text", Licence()}, "has no tokenizer");
  ExpectRefused({"perplexity", small, "--text", "x", "--protocol", "gptq"}, "--protocol");
  ExpectRefused({"perplexity", small, "--text", "x", "--context", "-4"}, "--context");
  ExpectRefused({"perplexity", "/no/such/model", "--text", "x"}, "/no/such/model");
  ExpectRefused({"accuracy", "--model", small, "--text", Licence()}, "has no tokenizer");
}

TEST_F(QualityCommand, BadTextsAreOneLine) {
  NEEDS_DEFAULT_MODEL(model);
  const std::string missing = folder_ / "missing.txt";
  ExpectRefused({"perplexity", model, "--text", missing}, "missing.txt: cannot be read");
  ExpectRefused({"perplexity", model, "--text", File("empty.txt", "")}, "empty.txt");
  ExpectRefused({"perplexity", model, "--text",
                 File("bad.txt",
                      "abc\xff"
                      "def")},
                "bad.txt: ");
  const std::string few = File("few.txt", "Only a few words.");
  ExpectRefused({"perplexity", model, "--text", few}, "the text is too short");
  ExpectRefused({"perplexity", model, "--text", few, "--protocol", "llama.cpp"}, "at least 1024");
  ExpectRefused({"perplexity", model, "--text", Licence(), "--context", "10000000"},
                "--context is 10000000, expected 2 to");
  ExpectRefused({"perplexity", model, "--text", Licence(), "--context", "16", "--max-tokens", "64",
                 "--weights", "nf5"},
                "--weights has");
  ExpectRefused({"perplexity", model, "--text", Licence(), "--context", "16", "--logprobs",
                 folder_ / "no/such/folder"},
                "--logprobs: cannot write");
}

TEST_F(QualityCommand, LogProbabilitiesAddUpToThePerplexity) {
  NEEDS_DEFAULT_MODEL(model);
  for (const char* name : {"log.csv", "log.jsonl"}) {
    const std::string file = folder_ / name;
    const Result result =
        Run({"perplexity", model, "--text", Licence(), "--protocol", "llama.cpp", "--context", "32",
             "--max-tokens", "100", "--threads", "1", "--logprobs", file, "--json"});
    ASSERT_EQ(result.code, 0) << result.output;
    const nlohmann::json report = LastLine(result.output);
    EXPECT_EQ(report["windows"], 3);
    EXPECT_EQ(report["scored_tokens"], 3 * 15);

    EXPECT_FALSE(std::filesystem::exists(file + ".partial"));
    std::ifstream stream(file);
    std::string line;
    const bool csv = file.ends_with(".csv");
    if (csv) {
      std::getline(stream, line);
      EXPECT_EQ(line, "window,position,token,logprob");
    }
    double sum = 0;
    int lines = 0;
    while (std::getline(stream, line)) {
      sum += csv ? std::stod(line.substr(line.rfind(',') + 1))
                 : nlohmann::json::parse(line)["logprob"].get<double>();
      ++lines;
    }
    EXPECT_EQ(lines, 3 * 15);
    EXPECT_NEAR(-sum / lines, report["mean_loss"].get<double>(), 1e-7);
  }
}

TEST_F(QualityCommand, QuantizeReportsOutlierFeatures) {
  NEEDS_DEFAULT_MODEL(model);
  const std::string out = folder_ / "out.gguf";
  ExpectRefused(
      {"quantize", model, folder_ / "out", "--weights", "keep", "--calibration-text", Licence()},
      "--calibration-text is for an OUT that ends in .gguf, --report or --json");
  ExpectRefused({"quantize", model, out, "--weights", "keep", "--report", "--calibration-text",
                 folder_ / "none.txt"},
                "none.txt: cannot be read");
  EXPECT_FALSE(std::filesystem::exists(out));
  const Result without = Run({"quantize", model, out, "--weights", "keep", "--report"});
  ASSERT_EQ(without.code, 0) << without.output;
  EXPECT_THAT(without.output, HasSubstr("outlier features: not looked for"));
  std::filesystem::remove(out);
  const std::string text = File("some.txt", "It is a truth universally acknowledged, that.");
  const Result with =
      Run({"quantize", model, out, "--weights", "keep", "--json", "--calibration-text", text});
  ASSERT_EQ(with.code, 0) << with.output;
  const size_t begin = with.output.find("\n{"), end = with.output.rfind("\n}");
  ASSERT_NE(begin, std::string::npos) << with.output;
  const auto json = nlohmann::json::parse(with.output.substr(begin, end + 2 - begin));
  const auto& outliers = json["outlier_features"];
  EXPECT_EQ(outliers["threshold"], 6.0);
  EXPECT_GT(outliers["tokens"], 5);
  // This model's first token has enormous activations.
  ASSERT_FALSE(outliers["features"].empty());
  EXPECT_GE(outliers["features"][0]["largest"], 6.0);
}

TEST_F(QualityCommand, AccuracyOfConvertedWeights) {
  NEEDS_DEFAULT_MODEL(model);
  const Result result =
      Run({"accuracy", "--model", model, "--text", Licence(), "--window", "64", "--max-tokens",
           "128", "--weights", "nf4", "--weights", "int8", "--json"});
  ASSERT_EQ(result.code, 0) << result.output;
  const nlohmann::json int8 = LastLine(result.output);
  EXPECT_EQ(int8["weights"], "int8");
  const size_t begin = result.output.find("{\"weights\":\"nf4\"");
  ASSERT_NE(begin, std::string::npos) << result.output;
  const nlohmann::json nf4 =
      nlohmann::json::parse(result.output.substr(begin, result.output.find('\n', begin) - begin));
  EXPECT_EQ(nf4["positions"], 128);
  EXPECT_NEAR(nf4["bits_per_weight"].get<double>(), 4.5, 1e-9);
  // An order of magnitude apart on any text.
  EXPECT_GT(nf4["mean_kl"].get<double>(), 3 * int8["mean_kl"].get<double>());
  EXPECT_GT(int8["mean_kl"].get<double>(), 0);
}

}  // namespace
}  // namespace treadle
