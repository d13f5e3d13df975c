// The Hugging Face folder of a tiny model, for tests that spoil what is in it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "models/architectures/architecture.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/support/tiny_model.h"

namespace treadle {

class TinyFolder : public ScratchCheckpoint {
 protected:
  void SetUp() override { WriteBy(WriteTinyLlamaFolder); }
  void WriteBy(TinyWriter& write) {
    TinyModelOptions options;
    options.layers = 1;
    options.hidden = options.ffn_hidden = 32;
    options.heads = 2;
    options.kv_heads = 1;
    options.context = 16;
    options.tokenizer = false;
    const auto path = write(folder_.path(), options);
    ASSERT_TRUE(path.ok()) << path.status();
    config_ = nlohmann::json::parse(Read("config.json"));
  }
  // Writes another family's instead, of the options' own sizes.
  void WriteFamily(const char* architecture) {
    ASSERT_TRUE(WriteTinyFolder(*FindArchitecture(architecture), folder_.path(), {}).ok());
    config_ = nlohmann::json::parse(Read("config.json"));
  }
  void WriteConfig(const nlohmann::json& config) const { Write("config.json", config.dump()); }

  absl::Status Try() const { return Load(folder_.path()); }
  absl::StatusOr<std::unique_ptr<Checkpoint>> Open() const {
    return Checkpoint::Open(folder_.path());
  }

  nlohmann::json config_;  // as it was written
};

}  // namespace treadle
