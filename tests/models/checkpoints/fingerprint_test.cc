// Differences that tell one model from another.
#include "models/checkpoints/fingerprint.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/support/assert_ok.h"
#include "tests/support/file_sum.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

class FingerprintTest : public ScratchCheckpoint {
 protected:
  std::string Write(uint64_t seed = 1) {
    TinyModelOptions options;
    options.seed = seed;
    return *WriteTinyLlamaGguf(folder_.path(), options);
  }
  static std::string Of(const std::string& path) {
    const auto checkpoint = Checkpoint::Open(path).value();
    return Fingerprint(*checkpoint).value_or("none");
  }
  // Changes one bit and nothing that `ls -l` shows.
  static void FlipBit(const std::string& path, int64_t byte) {
    const auto written = std::filesystem::last_write_time(path);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(byte);
    const int old = file.get();
    file.seekp(byte);
    file.put(static_cast<char>(old ^ 1));
    file.close();
    std::filesystem::last_write_time(path, written);
  }
};

TEST_F(FingerprintTest, IsOfEveryByteAndNotOfNameSizeAndTime) {
  const std::string path = Write();
  const std::string sum = Of(path);
  EXPECT_EQ(sum, FileSha256(path));
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
  for (const int64_t byte : {size - 1, size / 2, size / 3 * 2}) {
    FlipBit(path, byte);
    EXPECT_NE(Of(path), sum) << byte;
    FlipBit(path, byte);
    EXPECT_EQ(Of(path), sum) << byte;
  }
  const std::string copy = path + "-copy.gguf";
  std::filesystem::copy_file(path, copy);
  EXPECT_EQ(Of(copy), sum);
}

TEST_F(FingerprintTest, OfAFolderIsOfWeightsAndConfiguration) {
  TinyModelOptions options;
  const std::string folder = *WriteTinyLlamaFolder(folder_.path(), options);
  const std::string sum = Of(folder);
  std::ofstream(folder + "/config.json", std::ios::app) << "\n";
  const std::string other = Of(folder);
  EXPECT_NE(other, sum);
  const std::string weights = folder + "/model.safetensors";
  FlipBit(weights, static_cast<int64_t>(std::filesystem::file_size(weights)) - 1);
  EXPECT_NE(Of(folder), other);
}

TEST_F(FingerprintTest, AFileThatWasReplacedMeanwhileIsNamed) {
  const std::string path = Write();
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(path));
  std::filesystem::remove(path);
  Write(/*seed=*/2);
  EXPECT_THAT(Fingerprint(*checkpoint).status().message(),
              HasSubstr(path + ": was changed while it was read"));
}

TEST_F(FingerprintTest, SumsAreKeptForTheNextProcessAndTakenOfTheSameFileAlone) {
  const std::string sums = folder_ / "model-sums";
  const std::string path = Write(/*seed=*/3);  // no other test has its sum
  KeepFileSums(sums);
  const std::string sum = Of(path);
  std::ifstream kept(sums);
  std::string line;
  while (std::getline(kept, line) && !line.ends_with(sum)) {
  }
  ASSERT_THAT(line, HasSubstr(sum));
  // As another process finds it: its sum is taken from there.
  const std::string claimed(64, 'f');
  std::ofstream(sums) << "not a line\n"
                      << line.substr(0, line.rfind(' ')) << " " << claimed << "\n";
  KeepFileSums(sums);
  EXPECT_EQ(Of(path), claimed);
  FlipBit(path, static_cast<int64_t>(std::filesystem::file_size(path)) - 1);
  EXPECT_EQ(Of(path), FileSha256(path));
}

}  // namespace
}  // namespace treadle
