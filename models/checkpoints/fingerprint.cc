#include "models/checkpoints/fingerprint.h"

#include <fstream>
#include <memory>
#include <optional>
#include <span>

#include "base/mapped_file.h"
#include "base/sha256.h"
#include "base/status.h"

namespace treadle {
namespace {

std::vector<std::shared_ptr<const MappedFile>> FilesOf(const Checkpoint& checkpoint) {
  std::vector<std::shared_ptr<const MappedFile>> files = checkpoint.weight_files();
  if (checkpoint.config_file() != nullptr) files.insert(files.begin(), checkpoint.config_file());
  return files;
}

}  // namespace

absl::StatusOr<ModelIdentity> IdentityOf(const Checkpoint& checkpoint) {
  ModelIdentity identity;
  Sha256 all;
  all.Add(std::as_bytes(std::span(checkpoint.recipe())));
  for (const auto& file : FilesOf(checkpoint)) {
    TREADLE_ASSIGN_OR_RETURN(const std::string sum, file->Sum());
    all.Add(std::as_bytes(std::span(sum)));
    identity.files.push_back({file->path(), sum});
  }
  const bool one = checkpoint.kind() == Checkpoint::Kind::kGguf && identity.files.size() == 1;
  identity.fingerprint = one ? identity.files[0].sum : all.Finish();
  return identity;
}

absl::StatusOr<std::string> Fingerprint(const Checkpoint& checkpoint) {
  TREADLE_ASSIGN_OR_RETURN(ModelIdentity identity, IdentityOf(checkpoint));
  return std::move(identity.fingerprint);
}

std::string MachineId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::string FilesHere(const Checkpoint& checkpoint) {
  const auto files = FilesOf(checkpoint);
  if (files.empty()) return "";
  std::string text = MachineId();
  for (const auto& file : files) {
    const std::optional<FileState> state = file->state();
    if (!state) return "";
    text += Str(" ", state->device, ":", state->inode, ":", state->bytes, ":", state->written, ":",
                state->changed);
  }
  Sha256 sum;
  sum.Add(std::as_bytes(std::span(text)));
  return sum.Finish();
}

}  // namespace treadle
