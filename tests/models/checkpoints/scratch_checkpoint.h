// A folder for a test's checkpoint files, and whether what lies there opens and loads.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "base/status.h"
#include "models/checkpoints/checkpoint.h"
#include "tests/support/run_one_token.h"

namespace treadle {

class ScratchCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    directory_ = std::filesystem::path(::testing::TempDir()) /
                 Str("treadle-", getpid(), "-", test->test_suite_name(), "-", test->name());
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string Path(const std::string& name) const { return (directory_ / name).string(); }
  void Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(directory_ / name, std::ios::binary) << bytes;
  }
  std::string Read(const std::string& name) const {
    std::ifstream file(directory_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // Opens the checkpoint, loads its model, and runs one token through it.
  static absl::Status Load(const std::string& path) {
    TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(path));
    return RunOneToken(*checkpoint);
  }

  // The file's fault, in one line that names the file and says `text`.
  static void ExpectRefused(const absl::Status& status, const std::string& path,
                            const std::string& text) {
    EXPECT_TRUE(absl::IsInvalidArgument(status) || absl::IsUnimplemented(status) ||
                absl::IsNotFound(status))
        << status;
    const std::string message(status.message());
    EXPECT_NE(message.find(path), std::string::npos) << message;
    EXPECT_NE(message.find(text), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }

  // 1 to 4 bytes of [0, end) changed, or sometimes the tail cut off.
  static std::string Mutate(std::string bytes, size_t end, std::mt19937& random) {
    const size_t changes = 1 + random() % 4;
    for (size_t i = 0; i < changes; ++i) {
      constexpr unsigned char kTelling[] = {0x00, 0x01, 0x7f, 0x80, 0xff, '"', '{', '9'};
      char& byte = bytes[random() % end];
      switch (random() % 3) {
        case 0:
          byte = static_cast<char>(kTelling[random() % std::size(kTelling)]);
          break;
        case 1:
          byte = static_cast<char>(byte ^ (1 << random() % 8));
          break;
        default:
          byte = static_cast<char>(random());
      }
    }
    if (random() % 16 == 0) bytes.resize(random() % bytes.size());
    return bytes;
  }

  std::filesystem::path directory_;
};

}  // namespace treadle
