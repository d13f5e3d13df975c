// Files of Hugging Face folders: good ones, and tables of bad ones, each refused with a line that
// names the file and the fault.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/status.h"
#include "tests/models/checkpoints/safetensors_file.h"
#include "tests/models/checkpoints/tiny_folder.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

class SafetensorsTest : public TinyFolder {
 protected:
  void SetUp() override {
    TinyFolder::SetUp();
    good_ = Safetensors::Parse(Read(kWeights));
  }

  Safetensors good_;
};

TEST_F(SafetensorsTest, GoodFoldersLoad) {
  EXPECT_EQ(Try(), absl::OkStatus());
  for (const Architecture& architecture : Architectures()) {
    ASSERT_TRUE(WriteTinyFolder(architecture, folder_.path(), {}).ok());
    EXPECT_EQ(Try(), absl::OkStatus()) << architecture.name;
  }
}

// Whoever opens a pipe without a writer waits for one.
TEST_F(SafetensorsTest, PipesAreRefused) {
  for (const char* name : {"config.json", kWeights}) {
    const std::string bytes = Read(name);
    std::filesystem::remove(Path(name));
    ASSERT_EQ(mkfifo(Path(name).c_str(), 0600), 0);
    ExpectRefused(Try(), Path(name), "is not a regular file");
    std::filesystem::remove(Path(name));
    Write(name, bytes);
  }
}

TEST_F(SafetensorsTest, EveryCorruptHeaderIsRefused) {
  const std::string q = "model.layers.0.self_attn.q_proj.weight";
  struct Row {
    const char* name;
    std::function<void(Safetensors&)> corrupt;
    std::string message;
  };
  const auto set = [&](const char* field, Json value) {
    return [=](Safetensors& file) { file.header[q][field] = value; };
  };
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  const Row rows[] = {
      {"missing", [&](Safetensors& file) { file.header.erase(q); }, "'" + q + "' is missing"},
      {"no object", [&](Safetensors& file) { file.header[q] = 3; }, "not described by an object"},
      {"dtype", set("dtype", "I32"), "'" + q + "' has dtype 'I32', expected F32, F16 or BF16"},
      {"unknown dtype", set("dtype", "F6"), "'" + q + "' has dtype 'F6', expected F32, F16"},
      {"smaller dtype", set("dtype", "I8"), "has 4096 bytes, expected 1024 elements of I8"},
      {"no dtype", set("dtype", 7), "'" + q + "' has no dtype"},
      {"no shape", set("shape", "x"), "'" + q + "' has no shape"},
      {"shape", set("shape", {16, 64}), "'" + q + "' has shape [16, 64], expected [32, 32]"},
      {"dimensions", set("shape", {1024}), "'" + q + "' has shape [1024], expected [32, 32]"},
      {"smaller shape", set("shape", {16, 32}), "has 4096 bytes, expected 512 elements"},
      {"negative extent", set("shape", {-32, -32}), "impossible shape"},
      {"wrapping extents", set("shape", {uint64_t{1} << 33, uint64_t{1} << 33}),
       "impossible shape"},
      {"huge extent", set("shape", {kHuge}), "impossible shape"},
      {"wrapping bytes", set("shape", {uint64_t{1} << 62}), "has 4096 bytes"},
      {"fraction", set("shape", {32.5, 32}), "impossible shape"},
      {"no offsets", set("data_offsets", Json()), "no pair of data_offsets"},
      {"three offsets", set("data_offsets", {0, 1, 2}), "no pair of data_offsets"},
      {"negative offset", set("data_offsets", {-1, 4095}), "no pair of data_offsets"},
      {"reversed offsets", set("data_offsets", {4096, 0}), "data_offsets [4096, 0], outside"},
      {"offset outside", set("data_offsets", {kHuge - 4096, kHuge}), "outside the file's"},
      {"overlap", set("data_offsets", {0, 4096}), "overlap"},
      {"truncated data", [](Safetensors& file) { file.data.pop_back(); }, "(truncated?)"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.name);
    Safetensors bad = good_;
    row.corrupt(bad);
    Write(kWeights, bad.Bytes());
    ExpectRefused(Try(), folder_.path(), row.message);
  }
}

TEST_F(SafetensorsTest, EveryCorruptFileIsRefused) {
  const auto number = [](uint64_t value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  const std::string entry = R"({"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  const std::pair<std::string, const char*> rows[] = {
      {"", "is empty"},
      {"1234567", "truncated"},
      {number(~uint64_t{0}), "header length is 18446744073709551615, expected at most 0"},
      {number(100) + "{}", "header length is 100, expected at most 2"},
      {Safetensors::Join("", ""), "is not valid JSON"},
      {Safetensors::Join("[]", ""), "expected a JSON object"},
      {Safetensors::Join("{\"a\":", ""), "is not valid JSON at byte"},
      {Safetensors::Join("{\"\xff\":1}", ""), "is not valid JSON at byte"},
      {Safetensors::Join("{\"a\":1e999}", ""), "is not valid JSON at byte"},
      {Safetensors::Join("{\"a\":" + std::string(1'000'000, '[') + "}", ""), "64 levels deep"},
      {Safetensors::Join("{\"a\":" + entry + ",\"a\":" + entry + "}", ""), "'a' appears twice"},
  };
  for (const auto& [bytes, message] : rows) {
    SCOPED_TRACE(message);
    Write(kWeights, bytes);
    ExpectRefused(Try(), Path(kWeights), message);
  }
}

TEST_F(SafetensorsTest, ShardsAreReadThroughTheIndex) {
  // Every other tensor into a second file: both hold all of the data.
  Safetensors parts[] = {good_, good_};
  Json map = Json::object();
  int next = 0;
  for (const auto& [name, entry] : good_.header.items()) {
    const int shard = next++ % 2;
    parts[1 - shard].header.erase(name);
    map[name] = Str("part-", shard, ".safetensors");
  }
  std::filesystem::remove(Path(kWeights));
  ExpectRefused(Try(), folder_.path(), "neither model.safetensors nor");
  Write("part-0.safetensors", parts[0].Bytes());
  Write("part-1.safetensors", parts[1].Bytes());
  Write(kIndex, Json({{"weight_map", map}}).dump());
  EXPECT_EQ(Try(), absl::OkStatus());

  Write(kIndex, "{}");
  ExpectRefused(Try(), Path(kIndex), "weight_map is not an object");
  const std::string first = map.begin().key();
  for (const Json& name : {Json("../part-0.safetensors"), Json("/etc/passwd"), Json(".."), Json(""),
                           Json(std::string("a\0b", 3)), Json("a\nb"), Json(7), Json()}) {
    Json bad = map;
    bad[first] = name;
    Write(kIndex, Json({{"weight_map", bad}}).dump());
    ExpectRefused(Try(), Path(kIndex), "is not a file name");
  }
  Json bad = map;
  bad[first] = "part-9.safetensors";
  Write(kIndex, Json({{"weight_map", bad}}).dump());
  ExpectRefused(Try(), Path("part-9.safetensors"), "cannot be opened");

  Write(kIndex, Json({{"weight_map", map}}).dump());
  Write("part-1.safetensors", good_.Bytes());
  ExpectRefused(Try(), Path("part-1.safetensors"), "is in another shard too");
}

// Whatever the bytes, an answer: loaded, or refused with a line that names a file of the folder.
TEST_F(SafetensorsTest, RandomMutationsNeverCrash) {
  std::mt19937 random(21);
  int loaded = 0, refused = 0;
  const std::string config = config_.dump(), weights = good_.Bytes();
  const size_t header = weights.size() - good_.data.size();
  for (int i = 0; i < 3000; ++i) {
    const bool in_config = i % 2 == 0;
    Write("config.json", in_config ? Mutate(config, config.size(), random) : config);
    Write(kWeights, in_config ? weights : Mutate(weights, header, random));
    const absl::Status status = Try();
    ++(status.ok() ? loaded : refused);
    if (!status.ok()) ExpectRefused(status, folder_.path(), "");
    if (HasFailure()) FAIL() << "mutation " << i;
  }
  EXPECT_GT(loaded, 10);
  EXPECT_GT(refused, 1000);
}

// Readers follow a value's nesting by recursion: too deep a file is refused before that.
TEST_F(SafetensorsTest, DeepOrBrokenTextFilesAreRefused) {
  TinyModelOptions options;
  ASSERT_TRUE(WriteTinyLlamaFolder(folder_.path(), options).ok());
  ASSERT_EQ(Try(), absl::OkStatus());
  constexpr int kDeep = 200'000;
  std::string deep = "{\"normalizer\":";
  for (int i = 0; i < kDeep; ++i) deep += R"({"type":"Sequence","normalizers":[)";
  for (int i = 0; i < kDeep; ++i) deep += "]}";
  deep += "}";
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}) {
    SCOPED_TRACE(name);
    const std::string good = Read(name);
    Write(name, deep);
    ExpectRefused(Try(), Path(name), "64 levels deep");
    Write(name, "{\"chat_template\":");
    ExpectRefused(Try(), Path(name), "is not valid JSON");
    if (good.empty()) {
      std::filesystem::remove(Path(name));
    } else {
      Write(name, good);
    }
  }
}

}  // namespace
}  // namespace treadle
