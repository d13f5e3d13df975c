// Files that change while they are read: what is loaded is one version of each, whole, under that
// version's identity, or an error names the file. Every change is walked over every step of
// reading, and every pair of changes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "kernels/reference/reference_backend.h"
#include "models/adapters/adapter_file.h"
#include "models/checkpoints/fingerprint.h"
#include "models/checkpoints/huggingface/text_files.h"
#include "tests/models/teacher_forcing.h"
#include "tests/support/assert_ok.h"
#include "tests/support/faults/changing_files.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// What reading gave: what it is called, and what it computes or says.
struct Read {
  std::string identity, contents;
  bool operator==(const Read&) const = default;
};
using Reader = std::function<absl::StatusOr<Read>(const std::string& path)>;

std::string LogitsOf(const Checkpoint& checkpoint, absl::Status& status) {
  constexpr int32_t kIds[] = {1, 2, 3, 5};
  auto forcing = TeacherForcing::Create(checkpoint, CreateReferenceBackend(),
                                        {.max_tokens = std::ssize(kIds), .chunk = 4});
  status = forcing.status();
  if (!status.ok()) return "";
  const std::vector<float> logits = (*forcing)->Logits(kIds);
  return {reinterpret_cast<const char*>(logits.data()), logits.size() * sizeof(float)};
}

// A model's start, with its fingerprint computed before or after it is loaded; a server does it
// meanwhile.
absl::StatusOr<Read> LoadModel(const std::string& path, bool fingerprint_first) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(path));
  Read read;
  if (fingerprint_first) {
    TREADLE_ASSIGN_OR_RETURN(read.identity, Fingerprint(*checkpoint));
  }
  absl::Status status;
  read.contents = LogitsOf(*checkpoint, status);
  TREADLE_RETURN_IF_ERROR(status);
  TREADLE_ASSIGN_OR_RETURN(const std::string after, Fingerprint(*checkpoint));
  if (!fingerprint_first) read.identity = after;
  EXPECT_EQ(read.identity, after);
  return read;
}

// What is beside the weights, as a server reads it and a gateway gets it.
absl::StatusOr<Read> ReadTexts(const std::string& path) {
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(path));
  TREADLE_RETURN_IF_ERROR(checkpoint->text_files().status());
  Read read;
  for (const auto& [name, file] : *checkpoint->text_files()) {
    TREADLE_ASSIGN_OR_RETURN(const std::string sum, file->Sum());
    read.identity += name + " " + sum + "\n";
  }
  TREADLE_ASSIGN_OR_RETURN(const RecommendedSampling sampling, checkpoint->Sampling());
  for (const auto& [name, value] : sampling.values) read.contents += Str(name, value, "\n");
  read.contents += checkpoint->chat_template() + "\n";
  if (checkpoint->tokenizer() != nullptr) {
    for (const auto& token : checkpoint->tokenizer()->tokens) read.contents += token.text + "\n";
  }
  TREADLE_ASSIGN_OR_RETURN(const auto given, ContentsOf(checkpoint->text_files()));
  for (const auto& [name, text] : given) read.contents += text;
  return read;
}

// An adapter, as its factors are copied.
absl::StatusOr<Read> ReadAdapter(const ModelConfig& config, const std::string& path) {
  TREADLE_ASSIGN_OR_RETURN(const auto file, AdapterFile::Open(path, config));
  Read read = {file->hash(), ""};
  for (const AdapterFactors& factors : file->factors()) {
    read.contents += Str(factors.name, " ", factors.scale, " ");
    for (const StoredTensor* tensor : {&factors.a, &factors.b}) {
      read.contents.append(reinterpret_cast<const char*>(tensor->data), tensor->bytes);
    }
  }
  TREADLE_RETURN_IF_ERROR(file->CheckUnchanged());
  return read;
}

// Other numbers in the last quarter of a file of weights: each float's mantissa.
std::string WithOtherWeights(std::string bytes, char bits) {
  for (size_t i = bytes.size() / 4 * 3 / 4 * 4 + 2; i < bytes.size(); i += 4) bytes[i] ^= bits;
  return bytes;
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  TREADLE_CHECK(from.size() == to.size());
  for (size_t at = text.find(from); at != text.npos; at = text.find(from, at + 1)) {
    text.replace(at, from.size(), to);
  }
  return text;
}

class FileChanges : public ::testing::Test {
 protected:
  // Walks changes of `file`, which is `path` or lies in it, to versions of equal length. The first
  // is what lies there.
  void Walk(const std::string& path, const std::string& file, std::vector<std::string> versions,
            const Reader& read) {
    ASSERT_EQ(versions.size(), 3u);
    const std::string name = fs::relative(file, path).string();
    std::vector<Read> known;
    for (const std::string& version : versions) {
      ChangeFile(file, FileEvent::kRenamedOver, version);
      ASSERT_OK_AND_ASSIGN(known.emplace_back(), read(path));
    }
    for (size_t i = 0; i < known.size(); ++i) {
      ASSERT_NE(known[i].identity, known[(i + 1) % 3].identity);
      ASSERT_NE(known[i].contents, known[(i + 1) % 3].contents);
    }
    int steps = 0;
    {
      ChangingFiles counted(file);
      ASSERT_EQ(read(path).status(), absl::OkStatus());
      steps = counted.steps();
    }
    ASSERT_GT(steps, 4);
    std::map<size_t, int> outcomes;  // by version; 3: errors
    const auto run = [&] {
      const absl::StatusOr<Read> found = read(path);
      if (!found.ok()) {
        ++outcomes[3];
        EXPECT_THAT(found.status().message(), HasSubstr(file));
        return;
      }
      size_t version = 0;
      while (version < 3 && *found != known[version]) ++version;
      EXPECT_LT(version, 3u) << "neither version whole";
      ++outcomes[version];
    };
    // The second change, if there is one, goes back to the first version or on to the third.
    constexpr std::pair<FileEvent, size_t> kSecond[] = {{FileEvent::kWrittenInPlace, 0},
                                                        {FileEvent::kCopiedWithItsTimes, 0},
                                                        {FileEvent::kRenamedOver, 2},
                                                        {FileEvent::kCopiedWithItsTimes, 2}};
    for (int first = 0; first < steps; ++first) {
      for (int second = first; second <= steps; ++second) {
        for (const FileEvent event : kFileEvents) {
          for (const auto& [then, version] : kSecond) {
            if (second == steps && version == 2) continue;  // no second change
            SCOPED_TRACE(Str(name, ": event ", static_cast<int>(event), " before step ", first,
                             ", ", static_cast<int>(then), " with version ", version,
                             " before step ", second, " of ", steps));
            ChangeFile(file, FileEvent::kRenamedOver, versions[0]);
            ChangingFiles changing(file);
            changing.Plan(first, event, versions[1]);
            if (second < steps) changing.Plan(second, then, versions[version]);
            run();
            if (HasFailure()) return;
          }
        }
      }
    }
    // Each version was read, and errors came, too.
    for (const size_t outcome : {0, 1, 2, 3}) EXPECT_GT(outcomes[outcome], 0) << outcome;
  }

  // A folder of a single layer, with what a test changes in it.
  std::string Folder(const TinyModelOptions& options = {.layers = 1, .hidden = 16}) {
    return WriteTinyLlamaFolder(folder_.Folder("model"), options).value();
  }

  const TestFolder folder_;
};

TEST_F(FileChanges, OfAGgufFile) {
  const std::string path = WriteTinyLlamaGguf(folder_.path(), {.layers = 1, .hidden = 16}).value();
  const std::string bytes = ReadWhole(path);
  Walk(path, path, {bytes, WithOtherWeights(bytes, 8), WithOtherWeights(bytes, 16)},
       [](const std::string& model) { return LoadModel(model, false); });
}

TEST_F(FileChanges, OfAFoldersWeights) {
  const std::string path = Folder(), file = path + "/model.safetensors", bytes = ReadWhole(file);
  Walk(path, file, {bytes, WithOtherWeights(bytes, 8), WithOtherWeights(bytes, 16)},
       [](const std::string& model) { return LoadModel(model, true); });
}

TEST_F(FileChanges, OfAShard) {
  const std::string path = folder_ / "sharded";
  fs::copy(TREADLE_TESTDATA "/models/llama-one-kv-head", path);
  const std::string file = path + "/model-00002-of-00004.safetensors", bytes = ReadWhole(file);
  Walk(path, file, {bytes, WithOtherWeights(bytes, 8), WithOtherWeights(bytes, 16)},
       [](const std::string& model) { return LoadModel(model, false); });
}

TEST_F(FileChanges, OfTheConfiguration) {
  const std::string path = Folder(), file = path + "/config.json", text = ReadWhole(file);
  Walk(path, file,
       {WithRopeTheta(text, "10000.0"), WithRopeTheta(text, "20000.0"),
        WithRopeTheta(text, "30000.0")},
       [](const std::string& model) { return LoadModel(model, true); });
}

TEST_F(FileChanges, OfTheTextSide) {
  const std::string path = Folder();
  const std::string generation = path + "/generation_config.json";
  const std::string sampling = R"({"temperature": 0.1, "do_sample": true})";
  std::ofstream(generation) << sampling;
  Walk(path, generation,
       {sampling, Replaced(sampling, "0.1", "0.2"), Replaced(sampling, "0.1", "0.3")}, ReadTexts);

  const std::string config = path + "/tokenizer_config.json", settings = ReadWhole(config);
  ASSERT_THAT(settings, HasSubstr("chat_template"));
  Walk(path, config,
       {settings, Replaced(settings, "message", "massage"),
        Replaced(settings, "message", "mossage")},
       ReadTexts);

  const std::string tokenizer = path + "/tokenizer.json", vocabulary = ReadWhole(tokenizer);
  Walk(path, tokenizer,
       {vocabulary, Replaced(vocabulary, "im_start", "im_begin"),
        Replaced(vocabulary, "im_start", "im_first")},
       ReadTexts);
}

TEST_F(FileChanges, OfAnAdapter) {
  const std::string path = folder_ / "adapter";
  fs::copy(TREADLE_TESTDATA "/adapters/llama", path);
  ASSERT_OK_AND_ASSIGN(const auto base, Checkpoint::Open(TREADLE_TESTDATA "/models/llama-grouped"));
  const auto read = [&](const std::string& adapter) {
    return ReadAdapter(base->config(), adapter);
  };
  const std::string weights = path + "/adapter_model.safetensors", bytes = ReadWhole(weights);
  Walk(path, weights, {bytes, WithOtherWeights(bytes, 8), WithOtherWeights(bytes, 16)}, read);
  const std::string config = path + "/adapter_config.json", text = ReadWhole(config);
  const std::string alpha = "\"lora_alpha\": 6";
  const std::string twice = Replaced(text, alpha, "\"lora_alpha\": 7");
  const std::string thrice = Replaced(text, alpha, "\"lora_alpha\": 8");
  Walk(path, config, {text, twice, thrice}, read);
}

// A server may go on with what it has when its file is replaced or renamed, and may not when it was
// written to.
TEST_F(FileChanges, WhatIsLoadedStaysWhatItIsCalled) {
  const std::string path = WriteTinyLlamaGguf(folder_.path(), {.layers = 1}).value();
  const std::string bytes = ReadWhole(path), other = WithOtherWeights(bytes, 8);
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(path));
  ASSERT_OK_AND_ASSIGN(const std::string fingerprint, Fingerprint(*checkpoint));
  const std::string here = FilesHere(*checkpoint);
  fs::permissions(path, fs::perms::owner_all);
  EXPECT_EQ(checkpoint->Revalidate(), absl::OkStatus());
  EXPECT_EQ(checkpoint->CheckUnchanged(), absl::OkStatus());
  fs::create_hard_link(path, path + "-link");
  EXPECT_EQ(checkpoint->CheckUnchanged(), absl::OkStatus());
  ChangeFile(path, FileEvent::kRenamedOver, other);
  EXPECT_EQ(checkpoint->CheckUnchanged(), absl::OkStatus());
  EXPECT_EQ(Fingerprint(*checkpoint).value(), fingerprint);
  ASSERT_OK_AND_ASSIGN(const auto successor, Checkpoint::Open(path));
  EXPECT_NE(Fingerprint(*successor).value(), fingerprint);
  EXPECT_NE(FilesHere(*successor), here);
  // The same inode, size and time of writing, and other bytes.
  ChangeFile(path + "-link", FileEvent::kCopiedWithItsTimes, other);
  EXPECT_THAT(checkpoint->CheckUnchanged().message(), HasSubstr(path + ": was changed"));
  EXPECT_THAT(checkpoint->Revalidate().message(), HasSubstr(path + ": was changed"));
}

}  // namespace
}  // namespace treadle
