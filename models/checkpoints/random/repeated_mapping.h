// Read-only memory in which one block of bytes repeats, without being held more than once: however
// long it is, it costs the block and its page tables. As with a mapped file, dropping its pages
// (DropMappedPages) loses nothing.
//
// Thread safety: constant once made.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "absl/status/statusor.h"

namespace treadle {

class RepeatedMapping {
 public:
  // Maps at least `bytes`. `block` is filled up with zeros to whole pages. Errors:
  // ResourceExhausted when the system gives no memory or too few mappings.
  static absl::StatusOr<std::unique_ptr<RepeatedMapping>> Create(std::span<const std::byte> block,
                                                                 size_t bytes);
  ~RepeatedMapping();
  RepeatedMapping(const RepeatedMapping&) = delete;
  RepeatedMapping& operator=(const RepeatedMapping&) = delete;

  const std::byte* data() const { return data_; }
  static size_t PageBytes();

 private:
  RepeatedMapping(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}

  std::byte* const data_;
  const size_t bytes_;
};

}  // namespace treadle
