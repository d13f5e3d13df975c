// The K/V cache of an op case, in its backend's key order.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/backend.h"
#include "kernels/kv_elements.h"
#include "kernels/op_cases/random.h"

namespace treadle {

// Consecutive rows of one sequence; with live = false rows that belong to none.
struct CaseSequence {
  int64_t rows = 1;
  int64_t first_position = 0;
  bool live = true;
};

// Positions that a sequence of the case has, its own rows included.
inline int64_t LiveEnd(const CaseSequence& sequence) {
  return sequence.live ? sequence.first_position + sequence.rows : 0;
}

// One layer's pages, between two guard pages; slots that nobody set hold NaN. Each sequence of the
// case owns shuffled pages.
class KvCaseCache {
 public:
  // bf16: OpCase::bf16. fill_chunk: the sequences' own rows are in the cache already.
  KvCaseCache(const KvLayout& layout, std::span<const CaseSequence> sequences, Backend& backend,
              Random& random, bool bf16, bool fill_chunk)
      : backend_(backend), layout_(layout), bf16_(bf16) {
    layout_.key_order = backend.key_order();
    std::vector<int32_t> ids;
    for (const CaseSequence& sequence : sequences) {
      const int64_t pages = (LiveEnd(sequence) + layout_.page_size - 1) / layout_.page_size;
      pages_.emplace_back(static_cast<size_t>(pages));
      for (int32_t& page : pages_.back()) ids.push_back(page = static_cast<int32_t>(ids.size()));
    }
    layout_.num_pages = static_cast<int64_t>(ids.size()) + 3;
    for (size_t i = 0; i < 3; ++i) ids.push_back(static_cast<int32_t>(ids.size()));
    for (size_t i = ids.size() - 1; i > 0; --i) {
      std::swap(ids[i], ids[random.Below(static_cast<int64_t>(i) + 1)]);
    }
    for (auto& pages : pages_) {
      for (int32_t& page : pages) page = ids[page];
    }
    initial_.assign(static_cast<size_t>((layout_.num_pages + 2) * layout_.PageBytes()),
                    std::byte{0xff});
    for (size_t s = 0; s < pages_.size(); ++s) {
      const CaseSequence& sequence = sequences[s];
      const int64_t end = fill_chunk ? LiveEnd(sequence) : sequence.first_position;
      for (int64_t p = 0; sequence.live && p < end; ++p) FillSlot(s, p, random);
    }
    auto buffer = backend.Allocate(initial_.size());
    TREADLE_CHECK(buffer.ok());
    device_ = *std::move(buffer);
  }

  const KvLayout& layout() const { return layout_; }
  std::byte* pages() const { return device_.data() + layout_.PageBytes(); }
  const int32_t* PagesOf(size_t sequence) const { return pages_[sequence].data(); }

  void Upload() { backend_.CopyToDevice(device_.data(), initial_.data(), initial_.size()); }
  // [1 + num_pages + 1] pages, as uploaded, and all that lies on the device.
  const std::vector<std::byte>& initial() const { return initial_; }
  const Buffer& device() const { return device_; }

 private:
  void FillSlot(size_t sequence, int64_t position, Random& random) {
    std::byte* page = initial_.data() + PageAt(sequence, position);
    const int64_t slot = position % layout_.page_size;
    if (layout_.state.present()) return FillStateSlot(reinterpret_cast<float*>(page), slot, random);
    for (int64_t head = 0; head < layout_.kv_heads; ++head) {
      std::vector<float> key, value;
      for (int64_t i = 0; i < layout_.head_dim; ++i) {
        for (std::vector<float>* to : {&key, &value}) {
          const float x = random.Normal();
          to->push_back(bf16_ && layout_.dtype != DType::kI8 ? KvBf16(layout_.dtype, x) : x);
        }
      }
      KvRow(layout_, page, KvPart::kKey, head, slot).Store(key.data());
      if (layout_.latent_dim > 0) continue;
      KvRow(layout_, page, KvPart::kValue, head, slot).Store(value.data());
    }
  }
  // Fills what a position leaves in a state page; the first one makes what lies before, too.
  void FillStateSlot(float* page, int64_t slot, Random& random) {
    const StateLayout& state = layout_.state;
    const int64_t size = layout_.page_size;
    const auto fill = [&](int64_t at, int64_t count, auto value) {
      for (int64_t i = at; i < at + count; ++i) page[i] = value(page + i);
    };
    const auto normal = [&](float*) { return random.Normal(); };
    const int64_t before = (state.taps - 1) * state.channels;
    fill(before + slot * state.channels, state.channels, normal);
    if (slot == 0) fill(0, before, normal);
    if (state.heads == 0) return;
    const int64_t keys = state.key_heads * state.key_dim;
    const float root = std::sqrt(static_cast<float>(state.key_dim));
    fill(state.Keys(size) + slot * keys, keys, [&](float*) { return random.Normal() / root; });
    const int64_t changes = state.heads * state.value_dim;
    fill(state.Changes(size) + slot * changes, changes, normal);
    fill(state.Decays(size) + slot * state.heads, state.heads, [&](const float* at) {
      return (slot == 0 ? 0 : *(at - state.heads)) - 0.1f * std::fabs(random.Normal());
    });
    if (slot == 0) fill(state.State(size), state.heads * state.key_dim * state.value_dim, normal);
  }
  int64_t PageAt(size_t sequence, int64_t position) const {
    return (1 + pages_[sequence][position / layout_.page_size]) * layout_.PageBytes();
  }

  Backend& backend_;
  KvLayout layout_;
  const bool bf16_;
  std::deque<std::vector<int32_t>> pages_;  // per sequence
  std::vector<std::byte> initial_;
  Buffer device_;
};

}  // namespace treadle
