// Tables that are only looked up stay as they are stored: the same rows as packed ones, bit for
// bit, and no part of the file.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/op_cases/op_cases.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"
#include "tests/support/assert_ok.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

std::unique_ptr<Backend> MakeBackend() {
  return CreateCpuBackend({.threads = 1, .compute = ComputeMode::kExact}).value();
}

std::vector<float> Lookup(Backend& backend, const PackedMatrix& table, std::span<const int32_t> ids,
                          bool accumulate) {
  std::vector<float> out(ids.size() * table.k(), 0.25f);
  backend.Embed(table, ids, 0, accumulate,
                DenseTensor(out.data(), DType::kF32, static_cast<int64_t>(ids.size()), table.k()));
  return out;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A first stage's row of a token.
std::vector<float> Hidden(Model& model) {
  const ModelConfig& config = model.config();
  const int32_t token = 300, position = 0, page = 0;
  const SequenceSpan sequence = {0, 1, 0, &page};
  const KvLayout layout = {config.kv_heads, config.head_dim, 16, 1, DType::kF32};
  std::vector<std::byte> memory(layout.PageBytes());
  std::byte* const layer = memory.data();
  std::vector<float> hidden(static_cast<size_t>(config.hidden));
  const absl::Status status =
      model.Forward({{&token, 1}, {&position, 1}, {&sequence, 1}}, {layout, {&layer, 1}}, nullptr,
                    DenseTensor(hidden.data(), DType::kF32, 1, config.hidden));
  EXPECT_TRUE(status.ok()) << status;
  return hidden;
}

TEST(LookupTable, StoredRowsAreThoseOfThePackedTable) {
  constexpr int64_t kRows = 37;
  constexpr int64_t kColumns = 768;
  const std::vector<int32_t> ids = {0, 36, 5, -1, 15, 16, 5};
  const auto backend = MakeBackend();
  for (const WeightFormat& format : WeightFormats()) {
    SCOPED_TRACE(format.name);
    RandomMatrix random = MakeRandomMatrix(format, kRows, kColumns, 3);
    const auto packed = backend->Pack(random.source);
    random.source.file = std::make_shared<int>();
    const auto stored = backend->Pack(random.source);
    ASSERT_TRUE(packed.ok() && stored.ok());
    for (const bool accumulate : {false, true}) {
      EXPECT_TRUE(SameBits(Lookup(*backend, **packed, ids, accumulate),
                           Lookup(*backend, **stored, ids, accumulate)));
    }
    if (format.apart()) continue;  // its codes alone are no rows: packed all the same
    // It is the source that is read.
    EXPECT_EQ(random.source.file.use_count(), 2);
    const auto before = Lookup(*backend, **stored, ids, false);
    std::memset(random.bytes.data(), 0, random.bytes.size());
    EXPECT_FALSE(SameBits(before, Lookup(*backend, **stored, ids, false)));
  }
}

// Which tables of a model are looked up only: those of a first stage that has no head.
TEST(LookupTable, NeedsNoFileOnceItIsLoaded) {
  const TestFolder folder;
  for (const bool gpt2 : {false, true}) {
    for (const bool gguf : {false, true}) {
      SCOPED_TRACE(Str(gpt2 ? "GPT-2" : "Llama", gguf ? ", GGUF" : ", folder"));
      const auto write = gpt2 ? (gguf ? WriteTinyGpt2Gguf : WriteTinyGpt2Folder)
                              : (gguf ? WriteTinyLlamaGguf : WriteTinyLlamaFolder);
      ASSERT_OK_AND_ASSIGN(const auto path, write(folder.path(), {}));
      const auto backend = MakeBackend();
      ASSERT_OK_AND_ASSIGN(auto checkpoint, Checkpoint::Open(path));
      LoadOptions load;
      load.layers = {0, 1};
      load.max_batch_tokens = 8;
      ASSERT_OK_AND_ASSIGN(const auto model, Model::Load(*checkpoint, *backend, load));
      const std::vector<float> before = Hidden(*model);
      std::filesystem::resize_file(checkpoint->weight_files()[0]->path(), 1);
      EXPECT_FALSE(checkpoint->CheckUnchanged().ok());
      EXPECT_TRUE(SameBits(Hidden(*model), before));
      checkpoint.reset();
      EXPECT_TRUE(SameBits(Hidden(*model), before));
    }
  }
}

}  // namespace
}  // namespace treadle
