#include "engine/kv/kv_cache.h"

#include <gtest/gtest.h>

#include "kernels/reference/reference_backend.h"
#include "tests/support/prefix_model.h"

namespace treadle {
namespace {

class WindowModel : public PrefixModel {  // layer 0 sees a window, layer 1 everything
 public:
  WindowModel() {
    config_.layers = 2;
    config_.window = 16;
    config_.global_every = 2;
  }
};

// Else the first write to a new page would be one to new memory in every layer.
TEST(KvCache, APageIsInOnePieceOverAllLayers) {
  const std::unique_ptr<Backend> backend = CreateReferenceBackend();
  PrefixModel model;
  const auto cache =
      KvCache::Create(*backend, model, {.num_pages = 5, .dtype = DType::kF32}).value();
  const KvPages pages = cache.pages();
  EXPECT_EQ(pages.layout.PageStride(), PrefixModel::kLayers * pages.layout.PageBytes());
  EXPECT_EQ(pages.layers[1] - pages.layers[0], pages.layout.PageBytes());
  EXPECT_EQ(cache.whole_page_bytes(), pages.layout.PageStride());
}

TEST(KvCache, PagesOfAWindowLieBehindThoseOfTheWholeContext) {
  const std::unique_ptr<Backend> backend = CreateReferenceBackend();
  WindowModel model;
  const auto cache =
      KvCache::Create(*backend, model, {.num_pages = {5, 3}, .dtype = DType::kF32}).value();
  const KvPages pages = cache.pages();
  EXPECT_EQ(pages.layout.num_pages, 5);
  EXPECT_EQ(pages.window_layout.num_pages, 3);
  EXPECT_EQ(pages.layout.PageStride(), pages.layout.PageBytes());
  EXPECT_EQ(pages.layers[0] - pages.layers[1], 5 * pages.layout.PageStride());
}

}  // namespace
}  // namespace treadle
