#include "kernels/cpu/weight_arena.h"

#include <sys/mman.h>

#include "base/status.h"

namespace treadle {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// Buffers of so many bytes get huge pages of their own. Activations of 512 tokens lie on hundreds
// of small ones, which products look up row by row.
constexpr size_t kHugeFrom = size_t{128} << 10;
constexpr size_t kChunk = size_t{32} << 20;

size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

std::shared_ptr<uint8_t> MapMemory(size_t bytes) {
  const size_t slack = bytes >= kHugeFrom ? kHugePage : 0;
  if (bytes > SIZE_MAX / 2) return nullptr;
  const size_t mapped = RoundUp(bytes < 1 ? 1 : bytes, slack > 0 ? kHugePage : 4096) + slack;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  auto* aligned = static_cast<uint8_t*>(base);
  if (slack > 0) {
    const size_t address = reinterpret_cast<size_t>(base);
    aligned += RoundUp(address, kHugePage) - address;
    madvise(aligned, mapped - slack, MADV_HUGEPAGE);  // a refusal only costs speed
  }
  return {aligned, [base, mapped](uint8_t*) { munmap(base, mapped); }};
}

void ScratchMemory::Reserve(size_t bytes) {
  used_ = 0;
  if (bytes <= capacity_) return;
  memory_.reset();
  memory_ = MapMemory(bytes);
  TREADLE_CHECK(memory_ != nullptr);
  capacity_ = bytes;
}

absl::StatusOr<std::shared_ptr<uint8_t>> WeightArena::Allocate(size_t bytes) {
  const size_t needed = RoundUp(bytes < 1 ? 1 : bytes, 64);
  if (needed > capacity_ - used_) {
    const size_t capacity = needed > kChunk ? needed : kChunk;
    std::shared_ptr<uint8_t> chunk = MapMemory(capacity);
    if (chunk == nullptr) {
      return ResourceExhausted("no memory for ", capacity, " bytes of weights");
    }
    if (capacity > kChunk) return chunk;  // a chunk of its own; the current one goes on
    chunk_ = std::move(chunk);
    capacity_ = capacity;
    used_ = 0;
  }
  uint8_t* piece = chunk_.get() + used_;
  used_ += needed;
  return std::shared_ptr<uint8_t>(chunk_, piece);
}

}  // namespace treadle
