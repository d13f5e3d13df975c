// A page of a layer that keeps a state of fixed size instead of K and V of every position: gated
// delta rules (Yang et al. 2024), Mamba 2 (Dao and Gu 2024) and short convolutions.
//
// The state after a position is decay * the state before it + key x change. The page of positions
// [first, first + page_size) holds, in floats and in this order,
//
//   inputs   [taps - 1 + page_size, channels]  of the convolution: those of the taps - 1 positions
//                                              before `first`, then its own
//   keys     [page_size, key_heads, key_dim]   of a delta rule: of length 1
//   changes  [page_size, heads, value_dim]
//   decays   [page_size, heads]                logarithms, each of all decays since `first`
//   state    [heads, key_dim, value_dim]       the one before `first`
//
// so that a row follows from its own page alone: the first one of a page makes the page from the
// one before it. A sequence needs two pages, in turn, and may go back to any position of both.
#pragma once

#include <cstdint>

namespace treadle {

struct StateLayout {
  int64_t channels = 0;   // of the convolution; 0: the page is one of K and V
  int64_t taps = 0;       // positions that it sees, its own included
  int64_t key_heads = 0;  // 0: a convolution is all there is
  int64_t heads = 0;      // of values; as many for each key head
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  bool tiled = false;  // value head h reads key head h % key_heads; else h / group()

  bool present() const { return channels > 0; }
  int64_t group() const { return heads / key_heads; }
  int64_t KeyHeadOf(int64_t head) const { return tiled ? head % key_heads : head / group(); }
  // Where the parts of a page begin, and how many floats it has.
  int64_t Keys(int64_t page_size) const { return (taps - 1 + page_size) * channels; }
  int64_t Changes(int64_t page_size) const {
    return Keys(page_size) + page_size * key_heads * key_dim;
  }
  int64_t Decays(int64_t page_size) const {
    return Changes(page_size) + page_size * heads * value_dim;
  }
  int64_t State(int64_t page_size) const { return Decays(page_size) + page_size * heads; }
  int64_t Floats(int64_t page_size) const { return State(page_size) + heads * key_dim * value_dim; }
  friend bool operator==(const StateLayout&, const StateLayout&) = default;
};

}  // namespace treadle
