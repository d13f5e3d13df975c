// Paths of models: their names, what is said where there is none, and the hub's cache as
// huggingface_hub lays it out (docs: huggingface.co/docs/huggingface_hub/guides/manage-cache).
#include "models/checkpoints/model_path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "models/checkpoints/fingerprint.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/support/assert_ok.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class ModelPathTest : public ScratchCheckpoint {
 protected:
  void SetUp() override { setenv("HF_HUB_CACHE", (fs::path(Path("hub"))).c_str(), 1); }
  void TearDown() override { unsetenv("HF_HUB_CACHE"); }
  std::string Told(const std::string& path) const { return std::string(Load(path).message()); }

  // A model in the cache: blobs by their digests, and a snapshot of links to them.
  fs::path Cache(const std::string& commit) {
    const fs::path repository = fs::path(Path("hub")) / "models--org--tiny.model-1";
    const fs::path blobs = repository / "blobs", snapshot = repository / "snapshots" / commit;
    for (const fs::path& folder : {blobs, snapshot, repository / "refs"}) {
      fs::create_directories(folder);
    }
    EXPECT_TRUE(WriteTinyLlamaFolder(blobs.string(), {}).ok());
    for (const auto& file : fs::directory_iterator(blobs)) {
      const fs::path name = file.path().filename();
      fs::create_symlink(fs::path("../../blobs") / name, snapshot / name);
    }
    return snapshot;
  }
};

TEST_F(ModelPathTest, NamesAreAsAUserTypesThem) {
  const fs::path folder = fs::path(Path("Llama-3.1-8B"));
  fs::create_directories(folder);
  EXPECT_EQ(ModelNameOf(folder.string()), "Llama-3.1-8B");
  EXPECT_EQ(ModelNameOf(folder.string() + "/"), "Llama-3.1-8B");
  EXPECT_EQ(ModelNameOf(folder.string() + "/."), "Llama-3.1-8B");
  EXPECT_EQ(ModelNameOf("/a/SmolLM2-135M-Instruct.Q4_1.gguf"), "SmolLM2-135M-Instruct.Q4_1");
  EXPECT_EQ(ModelNameOf("model.bin"), "model.bin");
}

TEST_F(ModelPathTest, ASnapshotOfTheHubsCacheIsOpenedThroughItsLinks) {
  const fs::path snapshot = Cache("0123abc");
  ASSERT_TRUE(fs::is_symlink(snapshot / "config.json"));
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(snapshot.string()));
  EXPECT_NE(checkpoint->tokenizer(), nullptr);
  EXPECT_TRUE(checkpoint->CheckUnchanged().ok());
  EXPECT_TRUE(Fingerprint(*checkpoint).ok());
  EXPECT_EQ(ModelNameOf(snapshot.string()), "org/tiny.model-1");
}

TEST_F(ModelPathTest, WhereNothingIsTheErrorSaysWhatToName) {
  EXPECT_THAT(Told("/nowhere/model.gguf"),
              HasSubstr("/nowhere/model.gguf: cannot be opened: there is no such file or folder, "
                        "expected a .gguf file or a Hugging Face folder"));
  EXPECT_THAT(
      Told("https://huggingface.co/org/tiny"),
      HasSubstr("it is a URL, expected a .gguf file or a Hugging Face folder of this machine"));
  EXPECT_THAT(Told("gemma-3-270m"), HasSubstr("folder: scripts/fetch_model.sh, beside"));
  EXPECT_THAT(Told("model.gguf"), testing::EndsWith("or a Hugging Face folder"));
  EXPECT_THAT(Told("org/tiny.model-1"), HasSubstr("`hf download org/tiny.model-1`"));
  const fs::path older = Cache("0123abc"), newer = Cache("4567def");
  std::ofstream(fs::path(Path("hub/models--org--tiny.model-1/refs/main"))) << "4567def";
  EXPECT_THAT(Told("org/tiny.model-1"),
              HasSubstr("the hub's cache has that model: name " + newer.string()));
  fs::remove(newer / "config.json");
  std::ofstream(newer / "tiny-q4_0.gguf") << "GGUF";
  EXPECT_THAT(Told("org/tiny.model-1"), HasSubstr((newer / "tiny-q4_0.gguf").string()));
}

}  // namespace
}  // namespace treadle
