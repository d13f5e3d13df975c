// Owned device memory, made by Backend::Allocate. Move-only; freed on destruction.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace treadle {

class Buffer {
 public:
  Buffer() = default;
  Buffer(void* data, size_t bytes, std::function<void(void*)> free)
      : data_(data, std::move(free)), bytes_(bytes) {}

  std::byte* data() const { return static_cast<std::byte*>(data_.get()); }
  size_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<void, std::function<void(void*)>> data_{nullptr, [](void*) {}};
  size_t bytes_ = 0;
};

}  // namespace treadle
