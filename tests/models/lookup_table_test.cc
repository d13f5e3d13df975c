// Tables that are only looked up stay in the checkpoint's file: the same rows as packed ones, bit
// for bit, and no memory of the process' own.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/op_cases/op_cases.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

std::unique_ptr<Backend> MakeBackend() {
  auto backend = CreateCpuBackend({.threads = 1, .compute = ComputeMode::kExact});
  TREADLE_CHECK(backend.ok());
  return *std::move(backend);
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

TEST(LookupTable, RowsInTheFileAreThoseOfThePackedTable) {
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
TEST(LookupTable, OutlivesItsCheckpoint) {
  const std::string folder = testing::TempDir() + Str("/lookup-", getpid());
  std::filesystem::create_directories(folder);
  for (const bool gpt2 : {false, true}) {
    for (const bool gguf : {false, true}) {
      SCOPED_TRACE(Str(gpt2 ? "GPT-2" : "Llama", gguf ? ", GGUF" : ", folder"));
      const auto write = gpt2 ? (gguf ? WriteTinyGpt2Gguf : WriteTinyGpt2Folder)
                              : (gguf ? WriteTinyLlamaGguf : WriteTinyLlamaFolder);
      const auto path = write(folder, {});
      ASSERT_TRUE(path.ok()) << path.status();
      for (const int64_t layers : {2, 1}) {
        const auto backend = MakeBackend();
        auto checkpoint = Checkpoint::Open(*path);
        ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
        const StoredTensor& matrix = (*checkpoint)->tensors()[0];
        const std::weak_ptr<const void> file = (*checkpoint)->FileOf(matrix);
        LoadOptions load;
        load.layers = {0, layers};
        load.max_batch_tokens = 8;
        auto model = Model::Load(**checkpoint, *backend, load);
        ASSERT_TRUE(model.ok()) << model.status();
        checkpoint->reset();
        EXPECT_EQ(file.expired(), layers == 2);
        model->reset();
        EXPECT_TRUE(file.expired());
      }
    }
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace treadle
