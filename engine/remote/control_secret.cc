#include "engine/remote/control_secret.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/status.h"
#include "net/address.h"

namespace treadle {
namespace {

constexpr size_t kNonceBytes = 32;     // as many as a proof has
constexpr size_t kMinCharacters = 16;  // so that nobody guesses it
constexpr size_t kMaxCharacters = 4096;
constexpr char kSpace[] = " \t\r\n";

}  // namespace

absl::StatusOr<std::string> ReadControlSecret(const std::string& path) {
  std::ifstream file(path);
  std::string text(kMaxCharacters + 2, '\0');
  if (file) file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file && !file.eof()) {
    return InvalidArgument("--control-secret-file: cannot read ", path, ": ", std::strerror(errno));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  const size_t begin = std::min(text.find_first_not_of(kSpace), text.size());
  text = text.substr(begin, text.find('\n', begin) - begin);
  text.resize(text.find_last_not_of(kSpace) + 1);  // npos + 1: nothing is left
  if (text.size() < kMinCharacters || text.size() > kMaxCharacters) {
    return InvalidArgument("--control-secret-file: the first line of ", path, " has ", text.size(),
                           " characters, expected ", kMinCharacters, " to ", kMaxCharacters);
  }
  return text;
}

std::string DrawNonce() {
  std::string nonce(kNonceBytes, '\0');
  TREADLE_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), kNonceBytes) == 1);
  return nonce;
}

std::string MakeProof(const std::string& secret, ProofOf side, const std::string& call,
                      const std::string& opener_nonce, const std::string& answerer_nonce) {
  // Lengths make it plain where each part ends, whatever a peer's nonce is.
  const std::string said = Str("treadle control ", side == ProofOf::kWorker ? "worker " : "master ",
                               call, " ", opener_nonce.size(), " ", answerer_nonce.size(), " ") +
                           opener_nonce + answerer_nonce;
  unsigned char proof[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  TREADLE_CHECK(HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                     reinterpret_cast<const unsigned char*>(said.data()), said.size(), proof,
                     &size) != nullptr);
  return {reinterpret_cast<const char*>(proof), size};
}

bool SameProof(const std::string& a, const std::string& b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

bool StaysOnMachine(const std::string& listen) {
  if (listen.starts_with("unix:")) return true;
  const absl::StatusOr<Address> address = ParseAddress(listen);
  return address.ok() && IsLoopback(address->host);
}

}  // namespace treadle
