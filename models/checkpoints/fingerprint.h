// Tells one model from another: by content, wherever models are compared (a worker's
// handshake, a recording, stored requests, `system_fingerprint`).
//
// Thread safety: any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/mapped_file.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

// 64 hexadecimal digits: the SHA-256 of the one file of a GGUF model; of a split one, of the
// sums of its files, in order; of a folder, of its config.json and the sums of the files that hold
// its weights, in order; of random weights, of what they are made by. InvalidArgument if a file was
// replaced or written to since the checkpoint was opened.
absl::StatusOr<std::string> Fingerprint(const Checkpoint& checkpoint);

// SHA-256 of a file, and, if `state` is not null, the state in which it has that sum. A file is
// read once in a process, and again if its inode, size or times have changed. Errors: FileSha256's.
absl::StatusOr<std::string> FileSum(const std::string& path, FileState* state = nullptr);
// Sums of files are read from `path`, and kept there for the next process. A file that cannot be
// read or written costs time, and nothing else.
void KeepFileSums(const std::string& path);

// The same for all processes of one machine; another after it was started anew.
std::string MachineId();
// Stands for the files that were opened, as they were: of two checkpoints on a machine it is the
// same if they have opened the same files. Empty: there are none.
std::string FilesHere(const Checkpoint& checkpoint);

}  // namespace treadle
