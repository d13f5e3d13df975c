// K and V of one head of one sequence on their way from pages to shared memory, a block of
// kBlockPositions at a time, two blocks deep. Pages hold at least 16 slots, so the 16 positions of
// a block that one warp copies lie in one page.
//
// Positions before `begin` and from `limit` on, and features from head_dim on, become zeros and are
// not read: what lies there may be NaN.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention/attention_map.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {

struct KvSource {
  const char* head = nullptr;  // the head's K in page 0; V lies part_bytes after it
  int64_t page_bytes = 0;
  int64_t part_bytes = 0;
  const int32_t* page_ids = nullptr;
  int32_t page_shift = 0;
  int32_t head_dim = 0;  // a multiple of 8
  int32_t begin = 0;     // the first position that is seen
  int32_t limit = 0;     // positions, > begin
};

// kD: features in shared memory, a multiple of 16, at least head_dim.
template <int kD>
class KvPipeline {
 public:
  // 16 bytes more than the features: eight rows of a matrix lie in different banks.
  static constexpr int kRowBytes = 2 * kD + 16;
  static constexpr int kPartBytes = kBlockPositions * kRowBytes;
  static constexpr int kBytes = 2 * 2 * kPartBytes;

  // Blocks [first, end), first < end. All of a team, as for the other functions.
  TREADLE_DEVICE KvPipeline(const KvSource& source, char* shared, int first, int end)
      : source_(source), shared_(shared), first_(first), end_(end), page_(WarpPage(first)) {
    Issue(first);
    Issue(first + 1);
  }

  // K of `block`, [kBlockPositions] rows of kRowBytes. Blocks are asked for in order, keys before
  // values. What was returned for the block before is overwritten from here on.
  TREADLE_DEVICE char* Keys(int block) {
    if (block == first_) {
      simt::CopyAsyncWait<3>();
    } else {
      simt::CopyAsyncWait<1>();
    }
    simt::SyncWarpgroup();
    if (block > first_) Issue(block + 1);
    return Part(block, 0);
  }
  TREADLE_DEVICE char* Values(int block) {
    simt::CopyAsyncWait<2>();
    simt::SyncWarpgroup();
    return Part(block, 1);
  }

 private:
  TREADLE_DEVICE char* Part(int block, int part) const {
    return shared_ + (2 * ((block - first_) & 1) + part) * kPartBytes;
  }
  // The page of this warp's positions of a block.
  TREADLE_DEVICE int32_t WarpPage(int block) const {
    const int32_t position = block * kBlockPositions + 16 * TeamWarp();
    const int32_t last = source_.limit - 1;
    return source_.page_ids[(position < last ? position : last) >> source_.page_shift];
  }
  // Two groups per block, also of blocks that do not exist, so that waits can count.
  TREADLE_DEVICE void Issue(int block) {
    if (block < end_) {
      const char* page = source_.head + page_ * source_.page_bytes;
      page_ = WarpPage(block + 1);
      Copy(page, block, Part(block, 0));
      simt::CopyAsyncCommit();
      Copy(page + source_.part_bytes, block, Part(block, 1));
    } else {
      simt::CopyAsyncCommit();
    }
    simt::CopyAsyncCommit();
  }
  TREADLE_DEVICE void Copy(const char* page, int block, char* part) const {
    constexpr int kChunks = kD / 8;  // of 16 bytes in a row
    const int32_t first = block * kBlockPositions + 16 * TeamWarp();
    const int32_t first_slot = first & ((1 << source_.page_shift) - 1);
    TREADLE_UNROLL
    for (int i = 0; i < kD / 16; ++i) {
      const int chunk = simt::Lane() + 32 * i;
      const int row = chunk / kChunks;
      const int feature = chunk % kChunks * 8;
      const bool seen = first + row >= source_.begin && first + row < source_.limit;
      const bool valid = seen && feature < source_.head_dim;
      const int element = valid ? (first_slot + row) * source_.head_dim + feature : 0;
      simt::CopyAsync16(part + (16 * TeamWarp() + row) * kRowBytes + 2 * feature,
                        page + 2 * int64_t{element}, valid);
    }
  }

  const KvSource source_;
  char* const shared_;
  const int first_;
  const int end_;
  int32_t page_;  // of the next block that is issued
};

}  // namespace treadle::cuda
