#include "server/cli/model_hash.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <vector>

#include "base/sha256.h"
#include "base/status.h"

namespace treadle {

absl::Status CheckModelHash(const std::string& path, const std::string& expected) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return InvalidArgument("--model-sha256: ", path, " is a folder, expected one file");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return InvalidArgument("--model-sha256: cannot read ", path, ": ", std::strerror(errno));
  }
  Sha256 sum;
  std::vector<char> buffer(1 << 20);
  do {
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    sum.Add(std::as_bytes(std::span(buffer).first(static_cast<size_t>(file.gcount()))));
  } while (file);
  if (!file.eof()) return InvalidArgument("--model-sha256: ", path, " cannot be read to its end");
  const std::string found = sum.Finish();
  if (found == expected) return absl::OkStatus();
  return InvalidArgument("--model-sha256: ", path, " has ", found, ", expected ", expected);
}

}  // namespace treadle
