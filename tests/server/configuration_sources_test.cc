#include "server/configuration_sources.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>

#include "tests/server/access/test_certificates.h"
#include "tests/support/assert_ok.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

using testing::HasSubstr;

std::string FileOf(const std::string& text) {
  const std::string path = TestPath("file");
  WriteText(path, text);
  return path;
}

TEST(ConfigurationSources, AFlagOutranksTheEnvironmentAndThatTheFile) {
  const std::string file = FileOf(
      "# ours\nmax-queue = 1\n  max-batch-size=2\nmodel = a b # c.gguf\r\n\nmax-batch-tokens = "
      "3\n");
  unsetenv("TREADLE_MODEL");  // the tests' own, which outranks the file's
  setenv("TREADLE_MAX_QUEUE", "10", 1);
  setenv("TREADLE_MAX_BATCH_SIZE", "20", 1);
  ServeOptions options;
  options.max_queue = 100;
  const auto settings = ApplySources({{"--max-queue", {"100", "the command line"}}}, file, options);
  unsetenv("TREADLE_MAX_QUEUE");
  unsetenv("TREADLE_MAX_BATCH_SIZE");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(options.max_queue, 100);
  EXPECT_EQ(options.max_batch_size, 20);
  EXPECT_EQ(options.max_batch_tokens, 3);
  EXPECT_EQ(options.model, "a b # c.gguf");
  EXPECT_EQ(settings->at("--max-batch-size").source, "TREADLE_MAX_BATCH_SIZE");
  EXPECT_EQ(settings->at("--model").source, file + " line 4");

  // The printed text reads back to the same.
  ServeOptions again;
  const std::string printed = PrintSettings(*settings, options);
  ASSERT_TRUE(ApplySources({}, FileOf(printed), again).ok()) << printed;
  EXPECT_EQ(ToText(Describe(again, /*all=*/true)), ToText(Describe(options, /*all=*/true)));
}

absl::Status WithVariable(const std::string& name, const std::string& value) {
  setenv(name.c_str(), value.c_str(), 1);
  ServeOptions options;
  const absl::Status status = ApplySources({}, "", options).status();
  unsetenv(name.c_str());
  return status;
}

TEST(ConfigurationSources, AVariableThatNobodyReadsIsRefused) {
  const std::string message(WithVariable("TREADLE_MAX_BATCH_SIZ", "3").message());
  EXPECT_THAT(message, HasSubstr("the environment variable 'TREADLE_MAX_BATCH_SIZ' is no setting; "
                                 "did you mean 'TREADLE_MAX_BATCH_SIZE'?"));
  EXPECT_THAT(std::string(WithVariable("TREADLE_NONSENSE", "").message()),
              HasSubstr("'TREADLE_NONSENSE' is no setting (`treadle serve --help`"));
  EXPECT_TRUE(WithVariable("TREADLEMAX_BATCH_SIZ", "3").ok());
}

// Kubernetes, "Service": a pod has these for a service that is called treadle, or treadle-router.
TEST(ConfigurationSources, VariablesOfAServiceAreNobodysMistake) {
  for (const char* const name :
       {"TREADLE_SERVICE_HOST", "TREADLE_SERVICE_PORT", "TREADLE_SERVICE_PORT_GRPC", "TREADLE_PORT",
        "TREADLE_PORT_50051_TCP", "TREADLE_PORT_50051_TCP_PROTO", "TREADLE_PORT_50051_TCP_PORT",
        "TREADLE_PORT_50051_TCP_ADDR", "TREADLE_ROUTER_SERVICE_HOST", "TREADLE_ROUTER_PORT"}) {
    EXPECT_TRUE(WithVariable(name, "tcp://10.0.0.11:50051").ok()) << name;
  }
}

// Variables that this repository reads itself, also in tests, which start servers with it.
TEST(ConfigurationSources, VariablesThatAreReadElsewhereAreKnown) {
  namespace fs = std::filesystem;
  const std::regex read(
      "(?:getenv\\(\"|FromEnvironment\\(\"|environ\\.get\\(\"|\\$\\{)(TREADLE_[A-Z0-9_]+)");
  std::set<std::string> names;
  for (const char* const room : {"base", "bench", "engine", "kernels", "models", "net", "scheduler",
                                 "server", "tests", "deploy", "scripts"}) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(TREADLE_SOURCE) / room)) {
      const std::string extension = entry.path().extension();
      const std::set<std::string> sources = {".cc", ".h", ".cu", ".py", ".sh"};
      if (!sources.contains(extension)) continue;
      const std::string text = ReadWhole(entry.path());
      for (std::sregex_iterator at(text.begin(), text.end(), read), end; at != end; ++at) {
        names.insert((*at)[1]);
      }
    }
  }
  EXPECT_TRUE(names.contains("TREADLE_CPU_ISA"));
  EXPECT_TRUE(names.contains("TREADLE_KILLS"));
  for (const std::string& name : names) {
    const char* const before = std::getenv(name.c_str());
    if (before != nullptr) continue;  // another test would miss it
    EXPECT_TRUE(WithVariable(name, "x").ok()) << name;
  }
}

TEST(ConfigurationSources, EveryFlagCanBeReadFromAFile) {
  for (const ServeFlag& flag : ServeFlags()) {
    ASSERT_OK_AND_ASSIGN(const auto settings,
                         ReadSettingsFile(FileOf(std::string(flag.name + 2) + " = x\n")));
    EXPECT_EQ(settings.at(flag.name).value, "x");
  }
}

TEST(ConfigurationSources, WhatIsWrongIsNamed) {
  struct Case {
    std::string text, message;
  };
  const Case cases[] = {
      {"max-queu = 1\n", "line 1: 'max-queu' is no setting; did you mean 'max-queue'?"},
      {"\nmetrics_listen = x\n",
       "line 2: 'metrics_listen' is no setting; did you mean 'metrics-listen'?"},
      {"config = x\n", "'config' is no setting"},
      {"listen\n", "line 1 is 'listen', expected name = value"},
      {"max-queue = 1\nmax-queue = 2\n", "line 2: 'max-queue' is there twice"},
      {"max-queue = many\n", "--max-queue ("},
      {"max-queue = many\n", "line 1) is 'many', expected a whole number"},
  };
  for (const Case& bad : cases) {
    ServeOptions options;
    const absl::Status status = ApplySources({}, FileOf(bad.text), options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
  EXPECT_EQ(ReadSettingsFile("/no/such").status().message(),
            "--config: cannot read /no/such: No such file or directory");
  EXPECT_FALSE(ReadSettingsFile(testing::TempDir()).ok());
  setenv("TREADLE_DRAIN_TIMEOUT", "soon", 1);
  ServeOptions options;
  const absl::Status status = ApplySources({}, "", options).status();
  unsetenv("TREADLE_DRAIN_TIMEOUT");
  EXPECT_THAT(std::string(status.message()), HasSubstr("--drain-timeout (TREADLE_DRAIN_TIMEOUT)"));
}

}  // namespace
}  // namespace treadle
