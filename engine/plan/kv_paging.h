// The pages of the K/V cache that a request takes.
//
// A whole page holds page_size positions of the layers that see everything, a window page as many
// of the layers that see a window or keep a state (ModelConfig::HasRing). A model has pages of one
// kind or of both, numbered apart. Whole pages keep all that a sequence writes. Its window pages
// are a ring: beyond its last page it begins again with the first, whose positions nobody sees any
// more. So a sequence reserves both once, at admission, and no page changes hands while it runs.
//
// A state's page follows from the one before it (kernels/state_layout.h), so that its ring is two
// pages and its window a page and the position itself.
//
// Thread safety: values and pure functions.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <ostream>
#include <utility>
#include <vector>

#include "models/architectures/model_config.h"

namespace treadle {

enum class PageKind : uint8_t { kWhole, kWindow };
inline constexpr PageKind kPageKinds[] = {PageKind::kWhole, PageKind::kWindow};

// Something of each kind.
template <typename T>
class ByKind {
 public:
  using Values = std::array<T, std::size(kPageKinds)>;  // in the order of kPageKinds

  constexpr ByKind(Values values = {})  // NOLINT: a table of values is one
      : values_(std::move(values)) {}
  constexpr T& operator[](PageKind kind) { return values_[static_cast<size_t>(kind)]; }
  constexpr const T& operator[](PageKind kind) const { return values_[static_cast<size_t>(kind)]; }
  friend bool operator==(const ByKind&, const ByKind&) = default;

 private:
  Values values_;
};

// A sequence's tables, by position: page i holds positions from i * page_size on. A model without
// pages of a kind has empty ones.
using SequencePages = ByKind<std::vector<int32_t>>;

// A plain number counts whole pages.
struct PageCounts : ByKind<int64_t> {
  constexpr PageCounts(int64_t whole = 0, int64_t window = 0)  // NOLINT: as said above
      : ByKind({whole, window}) {}

  bool FitsIn(const PageCounts& room) const {
    return std::ranges::all_of(kPageKinds,
                               [&](PageKind kind) { return (*this)[kind] <= room[kind]; });
  }
  PageCounts& operator-=(const PageCounts& other) {
    for (const PageKind kind : kPageKinds) (*this)[kind] -= other[kind];
    return *this;
  }
  friend bool operator==(const PageCounts&, const PageCounts&) = default;
  // "7", "7 + 3 window" or "3 window"
  friend std::ostream& operator<<(std::ostream& out, const PageCounts& pages) {
    const int64_t whole = pages[PageKind::kWhole], window = pages[PageKind::kWindow];
    if (whole > 0 || window == 0) out << whole;
    if (window > 0) out << (whole > 0 ? " + " : "") << window << " window";
    return out;
  }
};

// How sequences of one model lie in pages.
struct KvPaging {
  int64_t page_size = 0;  // positions
  int64_t ring = 0;       // the most window pages of a sequence; 0: no layer has a window
  bool whole = true;      // some layer sees everything
  int64_t window = 0;     // positions that the layers with a window see; 0: none has one

  // A step of `max_batch_tokens` rows writes them all before the first of them looks back: the ring
  // has a slot for each position of both. Rows of a state are written one after the other.
  static KvPaging Of(const ModelConfig& config, int64_t page_size, int64_t max_batch_tokens) {
    const int64_t rings = config.RingLayers(0, config.layers);
    const int64_t window = WindowOf(config, page_size);
    const int64_t together = window + max_batch_tokens - 1;
    const int64_t ring = config.HasStates() ? 2 : (together + page_size - 1) / page_size;
    return {.page_size = page_size,
            .ring = rings > 0 ? ring : 0,
            .whole = rings < config.layers,
            .window = window};
  }
  static int64_t WindowOf(const ModelConfig& config, int64_t page_size) {
    return config.HasStates() ? page_size + 1 : config.window;
  }

  // The first page that holds something which the row at `position` sees through its window.
  int64_t FirstSeen(int64_t position) const {
    return std::max<int64_t>(0, position - window + 1) / page_size;
  }

  // Pages of one kind for sequences with `prompt` tokens that grow to `tokens` positions.
  struct Share {
    int64_t total = 0;  // by position: page i holds positions from i * page_size on
    int64_t held = 0;   // at once: page i lies where page i - held did
    // How many of the pages [total - held, total), which nothing overwrites, hold nothing but
    // positions before the prompt's last: candidates can share these, the first ones.
    int64_t shared = 0;
  };
  Share ShareOf(PageKind kind, int64_t prompt, int64_t tokens) const {
    const bool has = kind == PageKind::kWhole ? whole : ring > 0;
    if (!has) return {};
    Share share{.total = (tokens + page_size - 1) / page_size};
    share.held = kind == PageKind::kWhole ? share.total : std::min(share.total, ring);
    const int64_t in_prompt = (prompt - 1) / page_size;
    share.shared = std::max<int64_t>(0, in_prompt - (share.total - share.held));
    return share;
  }

  // The pages that a request of so many candidates reserves (docs/design.md, Reservation).
  PageCounts Needed(int64_t prompt, int64_t tokens, int64_t candidates) const {
    PageCounts pages;
    for (const PageKind kind : kPageKinds) {
      const Share share = ShareOf(kind, prompt, tokens);
      pages[kind] = share.shared + candidates * (share.held - share.shared);
    }
    return pages;
  }
  PageCounts PagesFor(int64_t tokens) const { return Needed(1, tokens, 1); }
};

struct KvCapacity {
  KvPaging paging;
  PageCounts total_pages;
  PageCounts free_pages;

  // The kind of which a smaller part is free.
  PageKind Scarcest() const {
    const auto share = [this](PageKind kind) {
      const auto total = static_cast<double>(total_pages[kind]);
      return total > 0 ? static_cast<double>(free_pages[kind]) / total : 2;  // has none: not it
    };
    return share(PageKind::kWindow) < share(PageKind::kWhole) ? PageKind::kWindow
                                                              : PageKind::kWhole;
  }
};

}  // namespace treadle
