// Models in several GGUF files: names and keys as llama.cpp's tools/gguf-split writes them.
#include <gtest/gtest.h>

#include <filesystem>

#include "models/checkpoints/fingerprint.h"
#include "models/checkpoints/gguf/gguf_file.h"
#include "models/checkpoints/model_path.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/support/assert_ok.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

class GgufPartsTest : public ScratchCheckpoint {
 protected:
  void SetUp() override { WriteTinyLlamaGguf(Path(""), {.format = "q8_0", .layers = 2}).value(); }

  static std::string Name(int64_t part) {
    return "big-0000" + std::to_string(part) + "-of-00003.gguf";
  }

  // The tiny model in three files; the first one's `no` and what all say of their number may lie.
  void Split(uint32_t first = 0, uint32_t count = 3, int64_t tensors_off = 0) {
    const auto whole = GgufFile::Read(Path("tiny-llama.gguf")).value();
    const auto& tensors = whole->tensors();
    for (size_t part = 0; part < 3; ++part) {
      GgufWriter writer;
      for (const GgufFile::RawPair& pair : whole->raw_metadata()) {
        if (part > 0) break;
        writer.AddRaw({reinterpret_cast<const char*>(pair.bytes.data()), pair.bytes.size()});
      }
      writer.AddU32("split.no", static_cast<uint32_t>(part) + (part == 0 ? first : 0));
      writer.AddU32("split.count", count);
      writer.AddU32("split.tensors.count",
                    static_cast<uint32_t>(std::ssize(tensors) + tensors_off));
      for (size_t i = part; i < tensors.size(); i += 3) {
        const StoredTensor& tensor = tensors[i];
        writer.AddTensor(tensor.name, tensor.shape, static_cast<uint32_t>(tensor.format->gguf_type),
                         {reinterpret_cast<const char*>(tensor.data), tensor.bytes});
      }
      Write(Name(static_cast<int64_t>(part) + 1), writer.Bytes());
    }
  }
};

TEST_F(GgufPartsTest, AnyPartOpensTheModel) {
  Split();
  const auto whole = Checkpoint::Open(Path("tiny-llama.gguf")).value();
  std::string fingerprint;
  for (const int64_t part : {1, 2, 3}) {
    ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(Path(Name(part))));
    ASSERT_EQ(checkpoint->tensors().size(), whole->tensors().size());
    for (const StoredTensor& tensor : whole->tensors()) {
      const StoredTensor* const found = checkpoint->Find(tensor.name);
      ASSERT_NE(found, nullptr) << tensor.name;
      EXPECT_EQ(found->shape, tensor.shape);
      EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(found->data), found->bytes),
                std::string_view(reinterpret_cast<const char*>(tensor.data), tensor.bytes));
    }
    EXPECT_EQ(checkpoint->path(), Path(Name(1)));
    EXPECT_EQ(checkpoint->weight_files().size(), 3u);
    EXPECT_EQ(checkpoint->config().layers, 2);
    EXPECT_TRUE(Load(Path(Name(part))).ok());
    const std::string sum = Fingerprint(*checkpoint).value();
    EXPECT_TRUE(part == 1 || sum == fingerprint);
    fingerprint = sum;
  }
  // The fingerprint is of all files: another byte in the last one is another model.
  std::string bytes = Read(Name(3));
  bytes.back() ^= 1;
  Write(Name(3), bytes);
  EXPECT_NE(Fingerprint(*Checkpoint::Open(Path(Name(1))).value()).value(), fingerprint);
}

TEST_F(GgufPartsTest, APartThatIsMissingIsNamed) {
  Split();
  std::filesystem::remove(Path(Name(2)));
  ExpectRefused(Load(Path(Name(1))), Path(Name(1)), "part 2 is missing: " + Path(Name(2)));
  ExpectRefused(Load(Path(Name(3))), Path(Name(3)), "part 2 is missing: " + Path(Name(2)));
  ExpectRefused(Load(Path(Name(2))), Path(Name(2)), "there is no such file");
}

TEST_F(GgufPartsTest, PartsThatDoNotBelongTogetherAreRefused) {
  Split();
  Write("other.gguf", Read(Name(1)));
  ExpectRefused(Load(Path("other.gguf")), Path("other.gguf"),
                "part 1 of 3 files, expected a name that ends with -00001-of-00003.gguf");
  Split(/*first=*/1);
  ExpectRefused(Load(Path(Name(2))), Path(Name(1)),
                "says that it is part 2 of 3 with 20 tensors in all, expected part 1 of 3");
  Split(0, /*count=*/70000);
  ExpectRefused(Load(Path(Name(1))), Path(Name(1)), "part 1 of 70000");
  Split(0, 3, /*tensors_off=*/1);
  ExpectRefused(Load(Path(Name(1))), Path(Name(1)), "have 20 tensors, expected 21");
  Split();
  const std::string second = Read(Name(2));
  Split(0, 3, 4);
  Write(Name(2), second);
  ExpectRefused(Load(Path(Name(1))), Path(Name(2)), "with 20 tensors in all, expected part 2 of 3");
}

TEST_F(GgufPartsTest, TheModelsNameIsWithoutThePart) {
  EXPECT_EQ(ModelNameOf("/a/Llama-3.3-70B-Q4_K_M-00002-of-00005.gguf"), "Llama-3.3-70B-Q4_K_M");
  EXPECT_EQ(ModelNameOf("/a/-00002-of-00005.gguf"), "-00002-of-00005");
  EXPECT_EQ(ModelNameOf("/a/tiny-00002-of-0005.gguf"), "tiny-00002-of-0005");
}

}  // namespace
}  // namespace treadle
