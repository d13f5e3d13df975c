// Measured costs of tiny models: times are there, bytes are those of the stages when loaded.

#include <gtest/gtest.h>

#include "engine/placement.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/models/checkpoints/scratch_checkpoint.h"
#include "tests/support/assert_ok.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

class PlacementCostsTest : public ScratchCheckpoint {
 protected:
  static CostOptions Options(Shard shard = {}) {
    CostOptions options;
    options.load.max_batch_tokens = 16;
    options.load.shard = shard;
    return options;
  }

  // Weights of stages, against models that are loaded so.
  static void ExpectBytesOfLoadedStages(const Checkpoint& checkpoint, const CostOptions& options) {
    ASSERT_OK_AND_ASSIGN(const auto backend, CreateCpuBackend({.threads = 1}));
    ASSERT_OK_AND_ASSIGN(const auto costs, MeasureCosts(checkpoint, *backend, options));
    ASSERT_EQ(costs.layers.size(), static_cast<size_t>(checkpoint.config().layers));
    for (const PlacementCosts::Part& layer : costs.layers) EXPECT_GT(layer.seconds, 0);
    EXPECT_GT(costs.head.seconds, 0);
    for (int stages = 1; stages <= checkpoint.config().layers; ++stages) {
      ASSERT_OK_AND_ASSIGN(const auto placed, PlaceLayers(costs, stages));
      for (const PlacedStage& stage : placed) {
        LoadOptions load = options.load;
        load.layers = stage.layers;
        ASSERT_OK_AND_ASSIGN(const auto model, Model::Load(checkpoint, *backend, load));
        const auto bytes = static_cast<double>(model->weight_bytes());
        // The final norm counts as a part of what the embedding weighs, where they are one.
        EXPECT_NEAR(static_cast<double>(stage.weight_bytes), bytes, 0.02 * bytes)
            << stage.layers.begin << " to " << stage.layers.end << " of " << stages;
        EXPECT_EQ(costs.kv_bytes_per_token,
                  static_cast<uint64_t>(2 * 2 * model->kv_heads() * checkpoint.config().head_dim));
      }
    }
  }
};

TEST_F(PlacementCostsTest, BytesAreThoseOfLoadedStages) {
  for (const bool tied : {true, false}) {
    for (const int64_t layers : {1, 3, 4, 6}) {
      TinyModelOptions tiny;
      tiny.format = "q8_0";
      tiny.layers = layers;
      tiny.tied_head = tied;
      ASSERT_OK_AND_ASSIGN(const auto path, WriteTinyLlamaGguf(folder_.path(), tiny));
      ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(path));
      SCOPED_TRACE(Str(layers, tied ? " tied" : " untied"));
      ExpectBytesOfLoadedStages(*checkpoint, Options());
      if (layers >= 3) ExpectBytesOfLoadedStages(*checkpoint, Options({.rank = 0, .size = 2}));
    }
  }
}

TEST_F(PlacementCostsTest, OtherArchitecturesAndContainers) {
  TinyModelOptions tiny;
  tiny.layers = 4;
  for (const auto& write : {WriteTinyGpt2Gguf, WriteTinyGpt2Folder, WriteTinyLlamaFolder}) {
    ASSERT_OK_AND_ASSIGN(const auto path, write(folder_.path(), tiny));
    ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(path));
    const auto backend = CreateCpuBackend({.threads = 1});
    ASSERT_OK_AND_ASSIGN(const auto costs, MeasureCosts(*checkpoint, **backend, Options()));
    // All layers are alike, and so are their costs.
    for (const PlacementCosts::Part& layer : costs.layers) {
      EXPECT_EQ(layer.seconds, costs.layers[0].seconds);
      EXPECT_EQ(layer.weight_bytes, costs.layers[0].weight_bytes);
    }
  }
}

}  // namespace
}  // namespace treadle
