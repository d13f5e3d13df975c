// CopyPages, of a K/V cache. Contract: kernels/backend.h.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {
namespace {

constexpr int kCopyThreads = 256;
constexpr int64_t kCopiesPerLaunch = 480;

struct CopyPagesParams {
  std::byte* pages;
  int64_t page_bytes;
  int32_t width;  // bytes of a thread: 16, or where pages are not so many times, 4
  int64_t stride;
  int32_t count;
  PageCopy copies[kCopiesPerLaunch];
};

// A thread has the same bytes of every page, so it sees its own earlier copies, and no other's
// matter: copies take effect in order without a barrier.
TREADLE_KERNEL(kCopyThreads) void CopyPagesKernel(CopyPagesParams p) {
  simt::AwaitEarlierLaunches();
  const int64_t at = p.width * (int64_t{simt::BlockX()} * kCopyThreads + simt::Thread());
  if (at >= p.page_bytes) return;
  for (int i = 0; i < p.count; ++i) {
    const auto* from = p.pages + p.copies[i].from * p.stride + at;
    auto* to = p.pages + p.copies[i].to * p.stride + at;
    if (p.width == 16) {
      *reinterpret_cast<simt::Words4*>(to) = *reinterpret_cast<const simt::Words4*>(from);
    } else {
      *reinterpret_cast<float*>(to) = *reinterpret_cast<const float*>(from);
    }
  }
}

}  // namespace

void CudaOps::CopyPages(const KvLayout& layout, std::byte* pages,
                        std::span<const PageCopy> copies) {
  const int64_t bytes = layout.PageBytes();
  const bool wide = (bytes | static_cast<int64_t>(reinterpret_cast<uintptr_t>(pages))) % 16 == 0;
  TREADLE_CHECK(wide || layout.state.present());  // whose pages are any number of floats
  const int32_t width = wide ? 16 : 4;
  const auto blocks = static_cast<uint32_t>((bytes / width + kCopyThreads - 1) / kCopyThreads);
  while (!copies.empty() && Ready()) {
    const size_t count = std::min<size_t>(copies.size(), kCopiesPerLaunch);
    CopyPagesParams params = {.pages = pages,
                              .page_bytes = bytes,
                              .width = width,
                              .stride = layout.PageStride(),
                              .count = static_cast<int32_t>(count),
                              .copies = {}};
    std::copy_n(copies.begin(), count, params.copies);
    device_->Launch(CopyPagesKernel, {.grid_x = blocks, .threads = kCopyThreads}, params);
    copies = copies.subspan(count);
  }
}

}  // namespace treadle::cuda
