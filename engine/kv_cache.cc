#include "engine/kv_cache.h"

#include <bit>

#include "base/status.h"

namespace treadle {
namespace {

absl::Status CheckOptions(const KvCache::Options& options, const Backend& backend) {
  if (options.page_size < 16 || !std::has_single_bit(static_cast<uint64_t>(options.page_size))) {
    return InvalidArgument("K/V cache: page size is ", options.page_size,
                           ", expected a power of two, at least 16");
  }
  if (options.num_pages < 1 || options.num_pages > INT32_MAX) {
    return InvalidArgument("K/V cache: number of pages is ", options.num_pages, ", expected 1 to ",
                           INT32_MAX);
  }
  const bool host = backend.key_order() == KeyOrder::kByFeature;
  if (options.dtype == DType::kI8 || (options.dtype == DType::kBF16 && host)) {
    return InvalidArgument("K/V cache: element type is ", Name(options.dtype), ", expected ",
                           host ? "f16 or f32" : "f16, bf16 or f32");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<KvCache> KvCache::Create(Backend& backend, const Model& model,
                                        const Options& options) {
  TREADLE_RETURN_IF_ERROR(CheckOptions(options, backend));
  KvCache cache;
  cache.backend_ = &backend;
  cache.layout_ = {.kv_heads = model.kv_heads(),
                   .head_dim = model.config().head_dim,
                   .page_size = options.page_size,
                   .num_pages = options.num_pages,
                   .dtype = options.dtype,
                   .key_order = backend.key_order()};
  const int64_t layers = model.layers().end - model.layers().begin;
  int64_t layer_bytes = 0;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(cache.layout_.PageBytes(), options.num_pages, &layer_bytes) ||
      __builtin_mul_overflow(layer_bytes, layers, &bytes)) {
    return InvalidArgument("K/V cache: ", options.num_pages, " pages of ",
                           cache.layout_.PageBytes(), " bytes in ", layers,
                           " layers are more bytes than a 64-bit integer holds");
  }
  TREADLE_ASSIGN_OR_RETURN(cache.memory_, backend.Allocate(static_cast<size_t>(bytes)));
  for (int64_t layer = 0; layer < layers; ++layer) {
    cache.layers_.push_back(cache.memory_.data() + layer * layer_bytes);
  }
  return cache;
}

void KvCache::CopyPages(std::span<const PageCopy> copies) {
  if (copies.empty()) return;
  for (std::byte* layer : layers_) backend_->CopyPages(layout_, layer, copies);
}

}  // namespace treadle
