#include "engine/kv/kv_cache.h"

#include <algorithm>
#include <bit>
#include <unordered_set>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

absl::Status CheckOptions(const KvCache::Options& options, const ByKind<int64_t>& layers,
                          const Backend& backend) {
  if (options.page_size < 16 || !std::has_single_bit(static_cast<uint64_t>(options.page_size))) {
    return InvalidArgument("K/V cache: page size is ", options.page_size,
                           ", expected a power of two, at least 16");
  }
  for (const PageKind kind : kPageKinds) {
    const int64_t pages = options.num_pages[kind];
    const int64_t least = layers[kind] > 0 ? 1 : 0;
    if (pages >= least && pages <= INT32_MAX) continue;
    return InvalidArgument("K/V cache: number of ", kind == PageKind::kWhole ? "" : "window ",
                           "pages is ", pages, ", expected ", least, " to ", INT32_MAX);
  }
  if (!HasKvType(backend, options.dtype)) {
    const bool host = HasKvType(backend, DType::kI8);
    return InvalidArgument("K/V cache: element type is ", Name(options.dtype), ", expected ",
                           host ? "f16, f32 or int8" : "f16, bf16 or f32");
  }
  return absl::OkStatus();
}

// How many of the first copies may be made in any order: none writes what another one touches.
size_t Independent(std::span<const PageCopy> copies) {
  std::unordered_set<int32_t> read, written;
  size_t count = 0;
  for (const PageCopy& copy : copies) {
    const bool apart =
        !written.contains(copy.from) && !read.contains(copy.to) && written.insert(copy.to).second;
    if (!apart) break;
    read.insert(copy.from);
    ++count;
  }
  return count;
}

}  // namespace

absl::StatusOr<KvCache> KvCache::Create(Backend& backend, const Model& model,
                                        const Options& options) {
  const ModelConfig& config = model.config();
  const auto [begin, end] = model.layers();
  const ByKind<int64_t> layers(
      {config.KvLayers(begin, end, /*local=*/false), config.KvLayers(begin, end, /*local=*/true)});
  TREADLE_RETURN_IF_ERROR(CheckOptions(options, layers, backend));
  ByKind<KvLayout> layouts;
  int64_t bytes = 0;
  for (const PageKind kind : kPageKinds) {
    const bool local = kind == PageKind::kWindow;
    layouts[kind] = {.kv_heads = local ? model.local_kv_heads() : model.kv_heads(),
                     .head_dim = config.HeadDim(local),
                     .page_size = options.page_size,
                     .num_pages = options.num_pages[kind],
                     .dtype = options.dtype,
                     .key_order = backend.key_order(),
                     .layers = layers[kind],
                     .latent_dim = config.latent_dim};
    if (kind == PageKind::kWindow) layouts[kind].state = model.state_layout();
    int64_t of_kind = 0;
    if (__builtin_mul_overflow(layouts[kind].PageStride(), options.num_pages[kind], &of_kind) ||
        __builtin_add_overflow(bytes, of_kind, &bytes)) {
      return InvalidArgument("K/V cache: ", options.num_pages, " pages of ",
                             layouts[kind].PageBytes(), " bytes in ", end - begin,
                             " layers are more bytes than a 64-bit integer holds");
    }
  }
  const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));  // no layer may have pages
  absl::StatusOr<Buffer> memory =
      options.memory == nullptr ? backend.Allocate(size) : options.memory->Take(size);
  if (absl::IsResourceExhausted(memory.status())) {
    return ResourceExhausted(kNoKvMemory, size, " bytes: ", memory.status().message());
  }
  TREADLE_RETURN_IF_ERROR(memory.status());
  TREADLE_ASSIGN_OR_RETURN(SlotTags tags,
                           SlotTags::Create(options.num_pages, options.page_size, options.memory));
  KvCache cache(std::move(tags));
  cache.backend_ = &backend;
  cache.num_pages_ = options.num_pages;
  cache.layouts_ = layouts;
  cache.memory_ = *std::move(memory);
  std::byte* at = cache.memory_.data();
  for (const PageKind kind : kPageKinds) {
    cache.first_[kind] = at;
    at += layouts[kind].PageStride() * layouts[kind].num_pages;
  }
  ByKind<std::byte*> part = cache.first_;
  for (int64_t layer = begin; layer < end; ++layer) {
    const PageKind kind = config.HasRing(layer) ? PageKind::kWindow : PageKind::kWhole;
    if (!config.HasKv(layer)) {
      const auto source = static_cast<size_t>(config.KvSource(layer) - begin);
      cache.layers_.push_back(source < cache.layers_.size() ? cache.layers_[source] : nullptr);
      continue;
    }
    cache.own_.emplace_back(kind, part[kind]);
    cache.layers_.push_back(part[kind]);
    part[kind] += layouts[kind].PageBytes();
  }
  return cache;
}

std::vector<std::byte> KvCache::ReadWholePage(int32_t page, uint64_t last_tag) const {
  const std::span<const uint64_t> tags = tags_.Of(PageKind::kWhole, page);
  if (tags.back() != last_tag || std::ranges::find(tags, 0) != tags.end()) return {};
  const std::byte* const at = first_[PageKind::kWhole] + page * whole_page_bytes();
  return {at, at + whole_page_bytes()};
}

void KvCache::WriteWholePage(int32_t page, std::span<const std::byte> bytes,
                             std::span<const uint64_t> tags) {
  const std::span<uint64_t> slots = tags_.Of(PageKind::kWhole, page);
  std::ranges::fill(slots, 0);
  std::ranges::copy(bytes, first_[PageKind::kWhole] + page * whole_page_bytes());
  std::ranges::copy(tags, slots.begin());
}

void KvCache::CopyPages(const ByKind<std::vector<PageCopy>>& copies) {
  for (const PageKind kind : kPageKinds) {
    std::span<const PageCopy> left = copies[kind];
    while (!left.empty()) {
      const std::span<const PageCopy> together = left.first(Independent(left));
      left = left.subspan(together.size());
      tags_.ClearCopies(kind, together);
      for (const auto& [of_kind, pages] : own_) {
        if (of_kind == kind) backend_->CopyPages(layouts_[kind], pages, together);
      }
      tags_.SetCopies(kind, together);
    }
  }
}

}  // namespace treadle
