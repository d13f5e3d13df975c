// Arrays on an emulated device, for tests of the emulation itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/runtime/device.h"
#include "tests/emulation/emulated_device.h"

namespace treadle::cuda {

inline std::unique_ptr<Device> OpenDevice(uint64_t seed = 1) {
  ScopedEmulation emulation({.seed = seed});
  return Device::Open(0).value();
}

template <typename T>
struct Array {  // on the device
  Array(Device& on, size_t count)
      : device(on), buffer(on.Allocate(count * sizeof(T)).value()), size(count) {}
  Array(Device& on, const std::vector<T>& values) : Array(on, values.size()) {
    device.CopyToDevice(data(), values.data(), size * sizeof(T));
  }
  T* data() const { return reinterpret_cast<T*>(buffer.data()); }
  std::vector<T> Read() const {
    std::vector<T> values(size);
    device.CopyToHost(values.data(), data(), size * sizeof(T));
    return values;
  }
  Device& device;
  Buffer buffer;
  size_t size;
};

}  // namespace treadle::cuda
