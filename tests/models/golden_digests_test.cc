// N5, the processor does not matter (docs/design.md, Numerics): what ops leave behind and the
// logits of models, on every instruction set that can run here, have the digests that are committed
// in tests/testdata/golden_digests.json. They were made on a processor that has all of these.
//
// A change that is meant to change bits, or the op cases, writes them anew: the tests with
// TREADLE_WRITE_DIGESTS=FILE in the environment add theirs to FILE.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/version.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/op_cases/op_cases.h"
#include "tests/kernels/op_checks.h"
#include "tests/models/teacher_forcing.h"
#include "tests/support/default_model.h"
#include "tests/support/file_sum.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;

constexpr ComputeMode kModes[] = {ComputeMode::kExact, ComputeMode::kInt16, ComputeMode::kInt8,
                                  ComputeMode::kBf16,  ComputeMode::kMixed, ComputeMode::kInt12};

std::unique_ptr<Backend> Open(CpuIsa isa, ComputeMode compute) {
  auto backend = CreateCpuBackend({.threads = 2, .compute = compute, .isa = isa});
  TREADLE_CHECK(backend.ok());
  return *std::move(backend);
}

Json Read(const std::string& path) {
  std::ifstream file(path);
  return file ? Json::parse(file) : Json::object();
}

class Digest {
 public:
  void Add(std::span<const float> values) { sum_.Add(std::as_bytes(values)); }
  std::string Finish() { return sum_.Finish().substr(0, 16); }

 private:
  Sha256 sum_;
};

// Expects digest(isa) to be what is committed as `key` on every instruction set.
template <typename Function>
void ExpectGolden(const std::string& key, Function digest) {
  static const Json golden = Read(TREADLE_TESTDATA "/golden_digests.json");
  const char* const to = std::getenv("TREADLE_WRITE_DIGESTS");
  for (const CpuIsa isa : SupportedIsas()) {
    const std::string found = digest(isa);
    if (to != nullptr) {
      Json all = Read(to);
      all[key] = found;
      std::ofstream(to) << all.dump(1) << '\n';
    } else {
      EXPECT_EQ(golden.value(key, ""), found) << key << " on " << Name(isa);
    }
  }
}

std::string LogitDigest(const Checkpoint& checkpoint, std::unique_ptr<Backend> backend,
                        std::span<const int32_t> ids, int64_t chunk, DType kv_dtype) {
  const auto model = TeacherForcing::Create(
      checkpoint, std::move(backend),
      {.max_tokens = std::ssize(ids), .chunk = chunk, .kv_dtype = kv_dtype, .threads = 2});
  TREADLE_CHECK(model.ok());
  Digest digest;
  digest.Add((*model)->Logits(ids));
  return digest.Finish();
}

// So what depends on bits (the numerics key, workers of one model) tells builds apart by it.
TEST(GoldenDigests, ThePlusOfTheVersionIsTheirDigest) {
  const auto digest = FileSha256(TREADLE_TESTDATA "/golden_digests.json");
  EXPECT_THAT(kVersion, ::testing::EndsWith("+" + digest.substr(0, 8)));
}

class GoldenOps : public ::testing::TestWithParam<ComputeMode> {};

TEST_P(GoldenOps, EveryOp) {
  for (const Op op : kOps) {
    ExpectGolden(Str("op ", Name(op), " ", Name(GetParam())), [&](CpuIsa isa) {
      const auto backend = Open(isa, GetParam());
      Digest digest;
      for (OpCase c : OpCases()) {
        if (c.op != op || c.slow) continue;
        c.bf16 = GetParam() == ComputeMode::kBf16;
        const auto run = Prepare(c, *backend, /*seed=*/1);
        run->Run();
        run->Finish();
        digest.Add(Output(*run));
      }
      return digest.Finish();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, GoldenOps, ::testing::ValuesIn(kModes),
                         [](const auto& info) { return std::string(Name(info.param)); });

void ExpectLogits(const std::string& folder, std::span<const ComputeMode> modes) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(TREADLE_TESTDATA "/" + folder)) {
    if (entry.is_directory()) names.push_back(entry.path().filename());
  }
  std::ranges::sort(names);
  EXPECT_GT(names.size(), 10u);
  for (const std::string& name : names) {
    const auto checkpoint = Checkpoint::Open(Str(TREADLE_TESTDATA "/", folder, "/", name));
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    std::vector<int32_t> ids;
    const auto vocab = static_cast<int32_t>((*checkpoint)->config().vocab);
    for (int32_t i = 0; i < 30; ++i) ids.push_back((7 * i + 3) % vocab);
    for (const ComputeMode mode : modes) {
      ExpectGolden(Str(folder, "/", name, " ", Name(mode)), [&](CpuIsa isa) {
        return LogitDigest(**checkpoint, Open(isa, mode), ids, 7, DType::kF32);
      });
    }
  }
}

// Float weights are multiplied alike in every mode but bf16.
TEST(GoldenDigests, SmallModels) {
  constexpr ComputeMode kFloatModes[] = {ComputeMode::kExact, ComputeMode::kBf16};
  ExpectLogits("models", kFloatModes);
}
TEST(GoldenDigests, QuantizedModels) { ExpectLogits("quantized", kModes); }

TEST(GoldenDigests, TheDefaultModel) {
  NEEDS_DEFAULT_MODEL(path);
  const auto checkpoint = Checkpoint::Open(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 71; ++i) ids.push_back(7 + 661 * i);
  for (const ComputeMode mode : kModes) {
    for (const DType cache : {DType::kF16, DType::kI8}) {
      const std::string_view with = cache == DType::kI8 ? ", K/V int8" : "";
      ExpectGolden(Str("default model ", Name(mode), with), [&](CpuIsa isa) {
        return LogitDigest(**checkpoint, Open(isa, mode), ids, /*chunk=*/64, cache);
      });
    }
  }
}

}  // namespace
}  // namespace treadle
