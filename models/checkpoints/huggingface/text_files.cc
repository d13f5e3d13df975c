#include "models/checkpoints/huggingface/text_files.h"

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <string_view>

#include "base/quoted.h"
#include "base/status.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;

// Neither weights nor what describes them.
bool IsTextSide(const std::string& name) {
  if (name == "config.json" || name.ends_with(".index.json")) return false;
  if (name.starts_with("LICENSE") || name.starts_with("NOTICE")) return true;
  return std::ranges::any_of(
      std::initializer_list<std::string_view>{".json", ".txt", ".jinja", ".model"},
      [&](std::string_view ending) { return name.ends_with(ending); });
}

// Somebody else made the folder: a link in it must not make us copy what it was never meant to
// hold. Links within it are good, and those of Hugging Face's cache, from snapshots/REVISION to
// blobs.
absl::Status CheckLink(const fs::path& folder, const fs::directory_entry& entry) {
  std::error_code error;
  const fs::path target = fs::canonical(entry.path(), error), home = fs::canonical(folder, error);
  const fs::path snapshots = home.parent_path(), blobs = snapshots.parent_path() / "blobs";
  const bool cached = snapshots.filename() == "snapshots" && target.parent_path() == blobs;
  if (!error && (target.parent_path() == home || cached)) return absl::OkStatus();
  return InvalidArgument(entry.path().string(), ": links to ", Quoted(target.string()),
                         ", outside of its folder, expected a file");
}

}  // namespace

absl::StatusOr<TextFiles> ReadTextFiles(FolderFiles& files) {
  const std::string& folder = files.path();
  TextFiles found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    std::error_code ignored;
    if (!IsTextSide(name) || !entry.is_regular_file(ignored) || entry.file_size(ignored) == 0) {
      continue;
    }
    if (entry.is_symlink(ignored)) TREADLE_RETURN_IF_ERROR(CheckLink(folder, entry));
    TREADLE_ASSIGN_OR_RETURN(found[name], files.Open(name));
  }
  if (error) return InvalidArgument(folder, ": cannot be listed: ", error.message());
  return found;
}

absl::StatusOr<std::map<std::string, std::string>> ContentsOf(
    const absl::StatusOr<TextFiles>& files) {
  TREADLE_RETURN_IF_ERROR(files.status());
  std::map<std::string, std::string> contents;
  for (const auto& [name, file] : *files) {
    TREADLE_RETURN_IF_ERROR(file->Revalidate());
    contents[name] = file->text();
    TREADLE_RETURN_IF_ERROR(file->CheckUnchanged());
  }
  return contents;
}

}  // namespace treadle
