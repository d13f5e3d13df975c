// The secret that master and workers share (--control-secret-file): each end of a stream proves to
// the other that it has it, over numbers that both draw anew (HMAC-SHA256, RFC 2104), before
// anything else is said. It tells friend from stranger on a network that may be listened to; it
// does not encrypt, and who can change what is on the wire needs mutual TLS against him.
//
// Thread safety: pure functions, but for what they read.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace treadle {

// The first line of a file, without space around it. InvalidArgument, naming the file and never
// what it holds: it cannot be read, or has fewer than 16 characters or more than 4096.
absl::StatusOr<std::string> ReadControlSecret(const std::string& path);

// 32 random bytes.
std::string DrawNonce();

enum class ProofOf { kWorker, kMaster };  // who answers the stream, and who opened it
// The proof in this stream that its sender knows `secret`. `call`: Attach, Follow or Train. With an
// empty `answerer_nonce`: before the other end has drawn one; worth a reading, not an answer.
std::string MakeProof(const std::string& secret, ProofOf side, const std::string& call,
                      const std::string& opener_nonce, const std::string& answerer_nonce);
// Headers that carry nonces and proofs.
inline constexpr char kNonceKey[] = "treadle-nonce-bin";
inline constexpr char kProofKey[] = "treadle-proof-bin";
// The header's value among those of a call; "" if it is not there.
template <typename Metadata>
std::string MetadataOf(const Metadata& metadata, const char* key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? "" : std::string(found->second.data(), found->second.size());
}
// In constant time.
bool SameProof(const std::string& a, const std::string& b);

// Only processes of this machine can reach that control address: unix:path, or a loopback host.
bool StaysOnMachine(const std::string& listen);

}  // namespace treadle
