// A folder for a test's checkpoint files, and whether what lies there opens and loads.
#pragma once

#include <gtest/gtest.h>

#include <iterator>
#include <random>
#include <string>

#include "base/status.h"
#include "models/checkpoints/checkpoint.h"
#include "tests/support/run_one_token.h"
#include "tests/support/test_folder.h"

namespace treadle {

class ScratchCheckpoint : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_ / name; }
  void Write(const std::string& name, const std::string& bytes) const {
    folder_.Write(name, bytes);
  }
  std::string Read(const std::string& name) const { return folder_.Read(name); }

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

  const TestFolder folder_;
};

}  // namespace treadle
