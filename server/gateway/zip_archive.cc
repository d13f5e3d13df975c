#include "server/gateway/zip_archive.h"

#include <zlib.h>

#include <cstdint>
#include <limits>
#include <string_view>

#include "base/status.h"

namespace treadle {
namespace {

constexpr uint16_t kVersion = 20;         // that a reader needs: 2.0
constexpr uint16_t kUtf8Names = 1 << 11;  // a flag
constexpr uint16_t kDate = 1 << 5 | 1;    // 1980-01-01

// Little-endian.
template <typename T>
void Put(T value, std::string& out) {
  for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

// The common part of a file's header and its entry in the directory.
void PutDescription(const std::string& name, std::string_view content, std::string& out) {
  Put(kVersion, out);
  Put(kUtf8Names, out);
  Put(uint16_t{0}, out);  // stored
  Put(uint16_t{0}, out);  // midnight
  Put(kDate, out);
  Put(static_cast<uint32_t>(
          crc32_z(0, reinterpret_cast<const Bytef*>(content.data()), content.size())),
      out);
  Put(static_cast<uint32_t>(content.size()), out);  // in the archive, and outside
  Put(static_cast<uint32_t>(content.size()), out);
  Put(static_cast<uint16_t>(name.size()), out);
  Put(uint16_t{0}, out);  // extra fields
}

}  // namespace

std::string ZipArchive(const std::map<std::string, std::string>& files) {
  std::string out, directory;
  for (const auto& [name, content] : files) {
    const size_t offset = out.size();
    TREADLE_CHECK(name.size() <= std::numeric_limits<uint16_t>::max());
    Put(uint32_t{0x04034B50}, out);
    PutDescription(name, content, out);
    out += name + content;
    TREADLE_CHECK(out.size() <= std::numeric_limits<uint32_t>::max());
    Put(uint32_t{0x02014B50}, directory);
    Put(kVersion, directory);  // that made it
    PutDescription(name, content, directory);
    Put(uint16_t{0}, directory);  // comment
    Put(uint16_t{0}, directory);  // disk
    Put(uint16_t{0}, directory);  // internal attributes
    Put(uint32_t{0}, directory);  // external attributes
    Put(static_cast<uint32_t>(offset), directory);
    directory += name;
  }
  const size_t offset = out.size();
  out += directory;
  Put(uint32_t{0x06054B50}, out);
  Put(uint16_t{0}, out);  // this disk, and that of the directory
  Put(uint16_t{0}, out);
  Put(static_cast<uint16_t>(files.size()), out);  // on this disk, and in all
  Put(static_cast<uint16_t>(files.size()), out);
  Put(static_cast<uint32_t>(directory.size()), out);
  Put(static_cast<uint32_t>(offset), out);
  Put(uint16_t{0}, out);  // comment
  return out;
}

}  // namespace treadle
