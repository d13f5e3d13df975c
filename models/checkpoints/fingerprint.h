// Tells one model from another by content: in a worker's handshake, in a recording, for stored
// requests, and as `system_fingerprint`.
//
// Thread safety: any thread.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

// What a checkpoint's numbers depend on.
struct ModelIdentity {
  struct File {
    std::string path;
    std::string sum;  // SHA-256, 64 hexadecimal digits
  };
  std::vector<File> files;  // of a folder, first its config.json; then the weight files, in order
  // 64 hexadecimal digits: the SHA-256 of a GGUF model's one file; of a split one, of the sums of
  // its files; of a folder, of the sums of `files`; of random weights, of what they are made from.
  std::string fingerprint;
};

// The identity of the bytes that the checkpoint holds, whatever lies under its paths by now.
// InvalidArgument if a file was written to since it was opened.
absl::StatusOr<ModelIdentity> IdentityOf(const Checkpoint& checkpoint);
// The `fingerprint` of it.
absl::StatusOr<std::string> Fingerprint(const Checkpoint& checkpoint);

// The same for all processes of one machine, and another after it was started anew.
std::string MachineId();
// Two checkpoints on a machine have the same FilesHere only if they have opened the same files in
// the same state: what one process knows of their bytes holds for the other. Empty if there are no
// files, or their states prove nothing.
std::string FilesHere(const Checkpoint& checkpoint);

}  // namespace treadle
