// A .safetensors file that tests take apart, spoil and put together again.
#pragma once

#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

namespace treadle {

struct Safetensors {
  nlohmann::json header;
  std::string data;

  static Safetensors Parse(const std::string& bytes) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof(length));
    return {nlohmann::json::parse(bytes.substr(8, length)), bytes.substr(8 + length)};
  }
  static std::string Join(const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header + data;
  }
  std::string Bytes() const { return Join(header.dump(), data); }

  // One tensor's bytes.
  std::string Tensor(const std::string& name) const {
    const size_t begin = header.at(name)["data_offsets"][0];
    const size_t end = header.at(name)["data_offsets"][1];
    return data.substr(begin, end - begin);
  }
  // Adds or replaces a tensor; the bytes of what it replaces stay behind.
  void Set(const std::string& name, const std::string& dtype, nlohmann::json shape,
           const std::string& bytes) {
    header[name] = {{"dtype", dtype},
                    {"shape", std::move(shape)},
                    {"data_offsets", {data.size(), data.size() + bytes.size()}}};
    data += bytes;
  }
};

}  // namespace treadle
