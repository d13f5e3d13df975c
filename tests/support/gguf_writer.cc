#include "tests/support/gguf_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/status.h"
#include "kernels/dtype.h"

namespace treadle {
namespace {

constexpr size_t kAlignment = 32;
constexpr size_t kBlock = 32;
enum : uint32_t { kU32 = 4, kI32 = 5, kF32 = 6, kBool = 7, kString = 8, kArray = 9 };

template <typename T>
void Put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void PutString(std::string& out, std::string_view text) {
  Put<uint64_t>(out, text.size());
  out.append(text);
}

void PutKey(std::string& out, std::string_view key, uint32_t type) {
  PutString(out, key);
  Put(out, type);
}

void Pad(std::string& out) {
  while (out.size() % kAlignment != 0) out.push_back(0);
}

void PutQ8_0(std::string& out, std::span<const float> block) {
  float largest = 0;
  for (const float x : block) largest = std::max(largest, std::abs(x));
  const Half scale = ToHalf(largest / 127);
  const float step = ToFloat(scale);
  Put(out, scale.bits);
  for (const float x : block) {
    const float code = step > 0 ? std::nearbyint(x / step) : 0;
    Put(out, static_cast<int8_t>(std::clamp(code, -127.0f, 127.0f)));
  }
}

void PutQ4_1(std::string& out, std::span<const float> block) {
  const auto [low, high] = std::ranges::minmax(block);
  const Half scale = ToHalf((high - low) / 15);
  const Half offset = ToHalf(low);
  Put(out, scale.bits);
  Put(out, offset.bits);
  const auto code = [&](float x) {
    const float step = ToFloat(scale);
    const float steps = step > 0 ? std::nearbyint((x - ToFloat(offset)) / step) : 0;
    return static_cast<uint8_t>(std::clamp(steps, 0.0f, 15.0f));
  };
  for (size_t i = 0; i < kBlock / 2; ++i) {
    Put(out, static_cast<uint8_t>(code(block[i]) | (code(block[i + kBlock / 2]) << 4)));
  }
}

}  // namespace

absl::StatusOr<std::string> EncodeWeights(std::string_view format, std::span<const float> values) {
  std::string out;
  if (format == "f32") {
    for (const float x : values) Put(out, x);
  } else if (format == "f16") {
    for (const float x : values) Put(out, ToHalf(x).bits);
  } else if (format == "bf16") {
    for (const float x : values) Put(out, ToBFloat16(x).bits);
  } else if ((format == "q8_0" || format == "q4_1") && values.size() % kBlock == 0) {
    for (size_t i = 0; i < values.size(); i += kBlock) {
      (format == "q8_0" ? PutQ8_0 : PutQ4_1)(out, values.subspan(i, kBlock));
    }
  } else {
    return Unimplemented("no encoder of ", values.size(), " values in '", format, "'");
  }
  return out;
}

void GgufWriter::AddString(std::string_view key, std::string_view value) {
  ++metadata_count_;
  PutKey(metadata_, key, kString);
  PutString(metadata_, value);
}

void GgufWriter::AddU32(std::string_view key, uint32_t value) {
  ++metadata_count_;
  PutKey(metadata_, key, kU32);
  Put(metadata_, value);
}

void GgufWriter::AddF32(std::string_view key, float value) {
  ++metadata_count_;
  PutKey(metadata_, key, kF32);
  Put(metadata_, value);
}

void GgufWriter::AddBool(std::string_view key, bool value) {
  ++metadata_count_;
  PutKey(metadata_, key, kBool);
  Put<uint8_t>(metadata_, value ? 1 : 0);
}

void GgufWriter::AddRaw(std::string_view pair) {
  ++metadata_count_;
  metadata_ += pair;
}

void GgufWriter::AddStrings(std::string_view key, const std::vector<std::string>& values) {
  ++metadata_count_;
  PutKey(metadata_, key, kArray);
  Put<uint32_t>(metadata_, kString);
  Put<uint64_t>(metadata_, values.size());
  for (const std::string& value : values) PutString(metadata_, value);
}

void GgufWriter::AddF32s(std::string_view key, const std::vector<float>& values) {
  ++metadata_count_;
  PutKey(metadata_, key, kArray);
  Put<uint32_t>(metadata_, kF32);
  Put<uint64_t>(metadata_, values.size());
  for (const float value : values) Put(metadata_, value);
}

void GgufWriter::AddI32s(std::string_view key, const std::vector<int32_t>& values) {
  ++metadata_count_;
  PutKey(metadata_, key, kArray);
  Put<uint32_t>(metadata_, kI32);
  Put<uint64_t>(metadata_, values.size());
  for (const int32_t value : values) Put(metadata_, value);
}

void GgufWriter::AddTensor(std::string_view name, const std::vector<int64_t>& shape,
                           uint32_t gguf_type, const std::string& data) {
  ++tensor_count_;
  PutString(infos_, name);
  Put<uint32_t>(infos_, static_cast<uint32_t>(shape.size()));
  for (auto extent = shape.rbegin(); extent != shape.rend(); ++extent) Put(infos_, *extent);
  Put(infos_, gguf_type);
  Put<uint64_t>(infos_, data_.size());
  data_ += data;
  Pad(data_);
}

std::string GgufWriter::Bytes() const {
  std::string out = "GGUF";
  Put<uint32_t>(out, 3);
  Put(out, tensor_count_);
  Put(out, metadata_count_);
  out += metadata_ + infos_;
  Pad(out);
  return out + data_;
}

}  // namespace treadle
