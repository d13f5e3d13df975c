#include "kernels/reference/reference_backend.h"

#include <cstring>
#include <new>

namespace treadle {

std::string ReferenceBackend::description() const {
  return Str("reference, compute ",
             Name(compute_ == ComputeMode::kAuto ? ComputeMode::kExact : compute_));
}

absl::StatusOr<Buffer> ReferenceBackend::Allocate(size_t bytes) {
  constexpr std::align_val_t kAlignment{64};
  void* data = ::operator new(bytes, kAlignment, std::nothrow);
  if (data == nullptr) return ResourceExhausted("cannot allocate ", bytes, " bytes");
  std::memset(data, 0, bytes);
  return Buffer(data, bytes, [](void* p) { ::operator delete(p, kAlignment); });
}

std::unique_ptr<Backend> CreateReferenceBackend(ComputeMode compute) {
  return std::make_unique<ReferenceBackend>(compute);
}

}  // namespace treadle
