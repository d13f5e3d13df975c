// K and V of one head of one sequence on their way from pages to shared memory, for two warpgroups:
// blocks of kBlockPositions as matrices of warpgroup.h, kD / 64 side by side, whose rows are
// positions. Keys are one block ahead of values. As in attention_kv.h, positions before
// `begin`, from `limit` on and features from head_dim on become zeros, and a page has at least 16
// slots, so the 8 positions that a warp copies lie in one.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention/attention_kv.h"
#include "kernels/cuda/runtime/warpgroup.h"

namespace treadle::cuda {

// kD: features in shared memory, 64 or 128.
template <int kD>
class WarpgroupKv {
 public:
  static_assert(kD == 64 || kD == 128);
  static constexpr int kHalfBytes = kBlockPositions * simt::kMatrixRowBytes;
  static constexpr int kPartBytes = kD / 64 * kHalfBytes;
  static constexpr int kBytes = 2 * 2 * kPartBytes;  // two blocks of K, two of V

  struct Layout {
    static constexpr int kThreads = 2 * simt::kWarpgroup;
    static constexpr int kKeptStride = kThreads;
    TREADLE_DEVICE static int Piece(int position, int piece) {
      return piece / 8 * kHalfBytes + simt::MatrixPiece(position, piece % 8);
    }
  };

  // Blocks [first, end), first < end. All threads, as for the other functions.
  TREADLE_DEVICE WarpgroupKv(const KvSource& source, char* shared, int first, int end)
      : source_(source),
        shared_(shared),
        first_(first),
        end_(end),
        piece_at_(Layout::Piece(kWarpPositions * simt::Warp() + simt::Lane() / kPieces,
                                simt::Lane() % kPieces)),
        key_page_(WarpPage(first)) {
    Issue(first - 1);
    Issue(first);
  }

  // Until the keys of the first block are there.
  TREADLE_DEVICE void FirstKeys() {
    simt::CopyAsyncWait<1>();
    simt::AsyncFence();
    simt::SyncThreads();
  }
  // Until the values of `block` and the keys of the next are there. The keys of `block` and the
  // values of the one before must not be in use any more. Blocks come in order.
  TREADLE_DEVICE void Advance(int block) {
    simt::CopyAsyncWait<0>();
    simt::AsyncFence();
    simt::SyncThreads();
    Issue(block + 1);
  }
  TREADLE_DEVICE char* Keys(int block) const { return shared_ + (block & 1) * kPartBytes; }
  TREADLE_DEVICE char* Values(int block) const { return shared_ + (2 + (block & 1)) * kPartBytes; }

 private:
  static constexpr int kWarpPositions = kBlockPositions / (Layout::kThreads / simt::kWarp);
  static constexpr int kPieces = kD / 8;  // of 16 bytes in a row
  static constexpr int kRowStep = simt::kWarp / kPieces;
  static constexpr int kCopies = kWarpPositions / kRowStep;
  static_assert(kWarpPositions == 8);  // the rows among which pieces change places

  TREADLE_DEVICE int32_t WarpPage(int block) const {
    const int32_t position = block * kBlockPositions + kWarpPositions * simt::Warp();
    const int32_t last = source_.limit - 1;
    return source_.page_ids[(position < last ? position : last) >> source_.page_shift];
  }
  // Values of `block` and keys of the next, those that there are.
  TREADLE_DEVICE void Issue(int block) {
    const char* page = source_.head + value_page_ * source_.page_bytes + source_.part_bytes;
    if (block >= first_ && block < end_) Copy(page, block, Values(block));
    page = source_.head + key_page_ * source_.page_bytes;
    if (block + 1 < end_) Copy(page, block + 1, Keys(block + 1));
    simt::CopyAsyncCommit();
    value_page_ = key_page_;
    key_page_ = WarpPage(block + 2);
  }
  // A thread copies piece Lane % kPieces of kCopies rows that are kRowStep apart.
  TREADLE_DEVICE void Copy(const char* page, int block, char* part) const {
    const int first = block * kBlockPositions + kWarpPositions * simt::Warp();
    const int first_slot = first & ((1 << source_.page_shift) - 1);
    const int left = source_.limit - first - simt::Lane() / kPieces;  // positions from its first on
    const int skipped = source_.begin - first - simt::Lane() / kPieces;
    const bool in_head = 8 * (simt::Lane() % kPieces) < source_.head_dim;
    const char* const from =
        page + 2 * int64_t{first_slot * source_.head_dim} + LaneOffset(source_.head_dim);
    TREADLE_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      const bool valid = in_head && kRowStep * i < left && kRowStep * i >= skipped;
      // Layout::Piece(first row + kRowStep i, piece): only bits that the first row leaves zero
      // change.
      char* const to =
          part + (piece_at_ ^ (kRowStep * i << 4)) + kRowStep * i * simt::kMatrixRowBytes;
      simt::CopyAsync16(to, valid ? from + 2 * kRowStep * i * source_.head_dim : page, valid);
    }
  }
  // In bytes, from the warp's first position on.
  TREADLE_DEVICE static int LaneOffset(int head_dim) {
    return 2 * (simt::Lane() / kPieces * head_dim + 8 * (simt::Lane() % kPieces));
  }

  const KvSource source_;
  char* const shared_;
  const int first_;
  const int end_;
  const int piece_at_;      // the first that this thread copies
  int32_t value_page_ = 0;  // of the next values that are issued
  int32_t key_page_;        // of the next keys
};

}  // namespace treadle::cuda
