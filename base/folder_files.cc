#include "base/folder_files.h"

#include <filesystem>
#include <utility>

#include "base/json_file.h"
#include "base/status.h"

namespace treadle {

std::string FolderFiles::PathOf(const std::string& name) const {
  return (std::filesystem::path(path_) / name).string();
}

absl::StatusOr<std::shared_ptr<const MappedFile>> FolderFiles::Open(const std::string& name) {
  auto known = files_.find(name);
  if (known == files_.end()) {
    absl::StatusOr<std::shared_ptr<const MappedFile>> file = MappedFile::Open(PathOf(name));
    // Hashed before anybody parses it: a rename over it is no change of its bytes then.
    if (file.ok()) {
      if (const auto sum = (*file)->Sum(); !sum.ok()) file = sum.status();
    }
    known = files_.emplace(name, std::move(file)).first;
  }
  return known->second;
}

absl::StatusOr<std::shared_ptr<const MappedFile>> FolderFiles::Find(const std::string& name) {
  auto file = Open(name);
  if (absl::IsNotFound(file.status())) return nullptr;
  return file;
}

bool FolderFiles::Has(const std::string& name) { return !absl::IsNotFound(Open(name).status()); }

absl::StatusOr<nlohmann::json> FolderFiles::Json(const std::string& name) {
  TREADLE_ASSIGN_OR_RETURN(const auto file, Open(name));
  return ParseJsonFile(*file);
}

}  // namespace treadle
