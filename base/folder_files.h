// The files of a folder, each opened once and then kept: all who read a file get the same bytes,
// whatever becomes of the folder meanwhile.
//
// Thread safety: confined to one thread; the files themselves: any thread.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "base/mapped_file.h"

namespace treadle {

class FolderFiles {
 public:
  explicit FolderFiles(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  std::string PathOf(const std::string& name) const;
  // The file of that name; null if there is none, nor was when it was first asked for. Errors:
  // MappedFile::Open's other ones.
  absl::StatusOr<std::shared_ptr<const MappedFile>> Find(const std::string& name);
  // As Find, NotFound if there is none.
  absl::StatusOr<std::shared_ptr<const MappedFile>> Open(const std::string& name);
  // Whether there is such a file, readable or not.
  bool Has(const std::string& name);
  // ReadJsonFile of it; also its errors.
  absl::StatusOr<nlohmann::json> Json(const std::string& name);

 private:
  const std::string path_;
  std::map<std::string, absl::StatusOr<std::shared_ptr<const MappedFile>>> files_;  // by name
};

}  // namespace treadle
