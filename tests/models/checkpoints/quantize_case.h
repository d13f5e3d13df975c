// Shared by tests of `treadle quantize`: small models in either container, and whether what is
// written reads back as the same bits.
#pragma once

#include <gmock/gmock.h>

#include <functional>
#include <string>
#include <vector>

#include "models/architectures/architecture.h"
#include "models/checkpoints/write/quantize_checkpoint.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/models/teacher_forcing.h"
#include "tests/support/tiny_model.h"

namespace treadle {

class QuantizeCheckpointTest : public ScratchCheckpoint {
 protected:
  // Rows of 48 and 80: blocks of 64 straddle them. With blocks of GGUF: 64 and 128.
  static TinyModelOptions Options(bool blocks) {
    TinyModelOptions options;
    options.hidden = blocks ? 64 : 48;
    options.ffn_hidden = blocks ? 128 : 80;
    options.tied_head = false;
    return options;
  }
  using WriteTiny =
      std::function<absl::StatusOr<std::string>(const std::string&, const TinyModelOptions&)>;
  std::string Tiny(const WriteTiny& write, const TinyModelOptions& options) const {
    return *write(folder_.Folder("in"), options);
  }

  std::string TinyFolder(const Architecture& architecture, const TinyModelOptions& options) const {
    return Tiny([&](const auto& in, const auto& o) { return WriteTinyFolder(architecture, in, o); },
                options);
  }
  std::string TinyGguf(const Architecture& architecture, const TinyModelOptions& options) const {
    return Tiny([&](const auto& in, const auto& o) { return WriteTinyGguf(architecture, in, o); },
                options);
  }

  static WeightPlan Plan(const std::string& text) {
    auto plan = WeightPlan::Parse(text);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? *plan : WeightPlan();
  }
  static absl::StatusOr<QuantizeReport> Make(const std::string& in, const std::string& out,
                                             const std::string& weights) {
    QuantizeOptions options;
    options.weights = Plan(weights);
    options.version = "1.2.3";
    options.threads = 2;
    options.errors = true;
    return QuantizeCheckpoint(in, out, options);
  }

  static std::vector<float> Logits(const std::string& path, const std::string& weights) {
    const auto checkpoint = Checkpoint::Open(path);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    if (!checkpoint.ok()) return {};
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < 12; ++i) ids.push_back(17 * i % 41);
    auto model = TeacherForcing::Create(**checkpoint, CreateReferenceBackend(),
                                        {.max_tokens = 12, .chunk = 12, .weights = Plan(weights)});
    EXPECT_TRUE(model.ok()) << model.status();
    return model.ok() ? (*model)->Logits(ids) : std::vector<float>();
  }

  // Writes `in` with these weights and reads it back.
  void ExpectSameBits(const std::string& in, const std::string& ending,
                      const std::string& weights) const {
    SCOPED_TRACE(Str(in, " ", weights));
    const std::string out = Path("out" + ending);
    std::filesystem::remove_all(out);
    const auto report = Make(in, out, weights);
    ASSERT_TRUE(report.ok()) << report.status();
    const std::vector<float> wanted = Logits(in, weights);
    ASSERT_FALSE(wanted.empty());
    EXPECT_EQ(Logits(out, ""), wanted);
    EXPECT_THAT(Leftovers(), testing::IsEmpty());
  }
  // The same with each fourth of `weights`, other ones at each `turn`: a loop over architectures
  // needs not try all with all.
  void ExpectSameBits(const std::string& in, const std::string& ending,
                      std::initializer_list<const char*> weights, size_t turn) const {
    for (size_t i = turn % 4; i < weights.size(); i += 4) {
      ExpectSameBits(in, ending, weights.begin()[i]);
    }
  }

  std::vector<std::string> Leftovers() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_.path())) {
      const std::string name = entry.path().filename().string();
      if (name.find("partial") != std::string::npos) names.push_back(name);
    }
    return names;
  }
};

}  // namespace treadle
