// The importance of columns in files as llama.cpp's tools/imatrix writes them, and in what is
// quantized.
#include "models/checkpoints/write/importance.h"

#include <gmock/gmock.h>

#include "models/checkpoints/gguf/gguf_file.h"
#include "tests/models/checkpoints/quantize_case.h"
#include "tests/support/assert_ok.h"
#include "tests/support/gguf_writer.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ImportanceTest : public QuantizeCheckpointTest {
 protected:
  // A matrix, and those of two experts, of which one met no row.
  std::string WriteFile(const std::string& type, const std::vector<float>& squares,
                        const std::string& counts = "blk.0.attn_q.weight.counts") {
    GgufWriter writer;
    const auto add = [&](const std::string& name, const std::vector<int64_t>& shape,
                         const std::vector<float>& values) {
      writer.AddTensor(name, shape, 0, *EncodeWeights("f32", values));
    };
    if (!type.empty()) writer.AddString("general.type", type);
    add("blk.0.attn_q.weight.in_sum2", {static_cast<int64_t>(squares.size())}, squares);
    add(counts, {1}, {4});
    add("blk.0.ffn_down.weight.in_sum2", {2}, {6, 4});
    add("blk.0.ffn_down.weight.counts", {1}, {2});
    add("blk.0.ffn_up_exps.weight.in_sum2", {2, 3}, {0, 0, 0, 3, 6, 9});
    add("blk.0.ffn_up_exps.weight.counts", {2, 1}, {0, 3});
    Write("imatrix.gguf", writer.Bytes());
    return Path("imatrix.gguf");
  }
};

TEST_F(ImportanceTest, FilesOfLlamaCppAreRead) {
  ASSERT_OK_AND_ASSIGN(const auto importance, Importance::Read(WriteFile("imatrix", {4, 8, 0})));
  EXPECT_THAT(importance.Of("blk.0.attn_q.weight"), ElementsAre(1, 2, 0));
  EXPECT_THAT(importance.Of("blk.0.ffn_down.weight"), ElementsAre(3, 2));
  EXPECT_THAT(importance.Of("blk.0.ffn_up_exps.0.weight"), ElementsAre(1, 1, 1));
  EXPECT_THAT(importance.Of("blk.0.ffn_up_exps.1.weight"), ElementsAre(1, 2, 3));
  EXPECT_THAT(importance.Of("blk.0.attn_k.weight"), IsEmpty());
}

TEST_F(ImportanceTest, OtherFilesAreRefused) {
  const auto message = [&](const std::string& path) {
    return std::string(Importance::Read(path).status().message());
  };
  EXPECT_THAT(message(WriteFile("", {1})), HasSubstr("general.type is '', expected imatrix"));
  EXPECT_THAT(message(WriteFile("model", {1})), HasSubstr("general.type is 'model'"));
  EXPECT_THAT(message(WriteFile("imatrix", {1, -1})),
              HasSubstr("has -1, expected sums of squares"));
  EXPECT_THAT(message(WriteFile("imatrix", {1}, "other.counts")),
              HasSubstr("as many numbers in 'blk.0.attn_q.weight.counts'"));
}

TEST_F(ImportanceTest, WhatIsWrittenReadsBack) {
  Importance importance;
  const float rows[] = {1, 2, 9, 3, 4, 9};
  importance.Add("blk.0.attn_q.weight", rows, 2, 2, 3);
  importance.Add("blk.0.attn_q.weight", rows, 1, 2, 3);
  importance.Add("blk.0.ffn_up_exps.2.weight", rows, 1, 3, 3);
  ASSERT_TRUE(importance.Write(Path("out.gguf"), "book.txt", 1, 512).ok());
  ASSERT_OK_AND_ASSIGN(const auto read, Importance::Read(Path("out.gguf")));
  EXPECT_THAT(read.Of("blk.0.attn_q.weight"), ElementsAre(11 / 3.0f, 24 / 3.0f));
  EXPECT_THAT(read.Of("blk.0.ffn_up_exps.2.weight"), ElementsAre(1, 4, 81));
  EXPECT_THAT(read.Of("blk.0.ffn_up_exps.0.weight"), ElementsAre(1, 1, 1));
  const auto file = GgufFile::Read(Path("out.gguf")).value();
  EXPECT_EQ(file->Integer("imatrix.chunk_count").value(), 1);
  EXPECT_EQ(file->Integer("imatrix.chunk_size").value(), 512);
  EXPECT_EQ(file->Find("imatrix.datasets")->strings[0], "book.txt");
}

// A matrix is that which Quantize makes with its columns' importance.
TEST_F(ImportanceTest, WeighsTheErrorsOfQuantizedMatrices) {
  const std::string in = Tiny(WriteTinyLlamaGguf, Options(true));
  Importance importance;
  std::vector<float> row(64);
  for (size_t i = 0; i < row.size(); ++i) row[i] = i % 3 == 0 ? 8.0f : 0.125f;
  importance.Add("blk.0.attn_q.weight", row.data(), 1, 64, 64);
  QuantizeOptions options;
  options.weights = Plan("q5_0");
  options.importance = &importance;
  ASSERT_TRUE(QuantizeCheckpoint(in, Path("out.gguf"), options).ok());
  const auto before = Checkpoint::Open(in).value();
  const auto after = Checkpoint::Open(Path("out.gguf")).value();
  const auto whole = [](int64_t count, const auto& body) { body(0, count); };
  for (const char* name : {"blk.0.attn_q.weight", "blk.0.attn_k.weight"}) {
    const StoredTensor& tensor = *before->Find(name);
    std::vector<float> values(static_cast<size_t>(tensor.Elements()));
    tensor.format->decode(tensor.data, tensor.Elements(), values.data());
    ASSERT_OK_AND_ASSIGN(const auto made,
                         Quantize(ParseQuantizeSpec("q5_0").value(), values, tensor.shape[0],
                                  tensor.shape[1], whole, importance.Of(name)));
    const StoredTensor& written = *after->Find(name);
    EXPECT_EQ(std::vector<std::byte>(written.data, written.data + written.bytes), made.data);
  }
  const auto message = [&](const Importance& other) {
    options.importance = &other;
    return std::string(QuantizeCheckpoint(in, Path("other.gguf"), options).status().message());
  };
  Importance other;
  other.Add("blk.7.attn_q.weight", row.data(), 1, 64, 64);
  EXPECT_THAT(message(other), HasSubstr("none of the matrices that change their format is among"));
  other.Add("blk.0.attn_q.weight", row.data(), 1, 32, 64);
  EXPECT_THAT(message(other),
              HasSubstr("importance of 'blk.0.attn_q.weight' is of 32 columns, expected 64"));
}

}  // namespace
}  // namespace treadle
