#include "server/cli/model_hash.h"

#include <openssl/evp.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

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
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> hash(EVP_MD_CTX_new(),
                                                                     EVP_MD_CTX_free);
  TREADLE_CHECK(EVP_DigestInit_ex(hash.get(), EVP_sha256(), nullptr) == 1);
  std::vector<char> buffer(1 << 20);
  do {
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    TREADLE_CHECK(EVP_DigestUpdate(hash.get(), buffer.data(), static_cast<size_t>(file.gcount())) ==
                  1);
  } while (file);
  if (!file.eof()) return InvalidArgument("--model-sha256: ", path, " cannot be read to its end");
  unsigned char digest[32];
  TREADLE_CHECK(EVP_DigestFinal_ex(hash.get(), digest, nullptr) == 1);
  std::string found;
  for (const unsigned char byte : digest) {
    constexpr char kDigits[] = "0123456789abcdef";
    found += kDigits[byte >> 4];
    found += kDigits[byte & 15];
  }
  if (found == expected) return absl::OkStatus();
  return InvalidArgument("--model-sha256: ", path, " has ", found, ", expected ", expected);
}

}  // namespace treadle
