// An input of a fuzz target, taken apart from its beginning. What is not there any more is zero or
// empty, so every input means something.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace treadle {

class FuzzInput {
 public:
  explicit FuzzInput(std::string_view bytes) : rest_(bytes) {}

  bool empty() const { return rest_.empty(); }
  // A number in the machine's order of bytes.
  template <typename T>
  T Number() {
    T value{};
    const std::string_view bytes = Bytes(sizeof(T));
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  uint8_t Byte() { return Number<uint8_t>(); }
  // Below `count`, which is at most 256.
  size_t Choose(size_t count) { return Byte() % count; }
  std::string_view Bytes(size_t count) {
    const std::string_view bytes = rest_.substr(0, count);
    rest_.remove_prefix(bytes.size());
    return bytes;
  }
  // A byte says how long it is.
  std::string_view Short() { return Bytes(Byte()); }
  // Up to the next byte of zero, which is taken too, or to the end.
  std::string_view Part() {
    const std::string_view part = Bytes(std::min(rest_.find('\0'), rest_.size()));
    Bytes(1);
    return part;
  }
  std::string_view Rest() { return Bytes(rest_.size()); }

 private:
  std::string_view rest_;
};

}  // namespace treadle
