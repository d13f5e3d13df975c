// A log of what a stage sent to the next one: a worker which takes the next stage's place can be
// given it again: the stages before need not run for it (Petals' second kind of cache, Borzunov et
// al. 2023, "Distributed Inference and Fine-tuning of Large Language Models Over The Internet",
// section 3.2).
//
// Rows lie as they are encoded on the wire, [pages][page_size], where their positions have their
// K/V: found by the sequence's table of whole pages, shared, kept and overwritten as those are. So
// nothing is accounted for here. The system provides the memory of a page when it is first written.
//
// Thread safety: thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "engine/kv/kept_memory.h"
#include "engine/wire_codec.h"

namespace treadle {

class ReplayLog {
 public:
  struct Options {
    WireType wire = WireType::kF32;
    int64_t hidden = 0;
    int64_t page_size = 0;
    int64_t pages = 0;             // from page 0 on; of others nothing is kept
    KeptMemory* memory = nullptr;  // where it lies, after the caches; null: its own
  };
  // The number of pages that `bytes` hold; at most `pages`.
  static int64_t PagesIn(int64_t bytes, const Options& options);

  // ResourceExhausted: no memory.
  static absl::StatusOr<ReplayLog> Create(const Options& options);

  // Whether it has the positions before `end`, once they were written.
  bool Holds(std::span<const int32_t> pages, int64_t end) const;
  // Keeps rows [rows, hidden] f32 of the positions from `first` on, those that it has pages for.
  void Write(std::span<const int32_t> pages, int64_t first, const Tensor& rows);
  // Copies what was kept of `count` positions that it holds; returns the end of it.
  std::byte* Read(std::span<const int32_t> pages, int64_t first, int64_t count,
                  std::byte* out) const;

 private:
  explicit ReplayLog(const Options& options) : options_(options) {}
  std::byte* At(std::span<const int32_t> pages, int64_t position) const;

  Options options_;
  size_t row_bytes_ = EncodedBytes(options_.wire, 1, options_.hidden);
  Buffer rows_;
};

}  // namespace treadle
