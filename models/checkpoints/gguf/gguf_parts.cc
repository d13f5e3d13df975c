// Models in several GGUF files, as llama-gguf-split writes them: the metadata is the first one's,
// each of the others has its own tensors and the keys split.*.
#include <cstdio>
#include <filesystem>

#include "base/status.h"
#include "models/checkpoints/gguf/gguf_file.h"

namespace treadle {
namespace {

constexpr int64_t kMaxParts = 9999;

// "-00001-of-00003.gguf" of the first part of three.
std::string Suffix(int64_t index, int64_t count) {
  char text[64];
  std::snprintf(text, sizeof(text), "-%05d-of-%05d.gguf", static_cast<int>(index + 1),
                static_cast<int>(count));
  return text;
}

// The part of number `index` from 0 on, as metadata say.
absl::Status CheckPart(const GgufFile& part, int64_t index, int64_t count, int64_t tensors) {
  TREADLE_ASSIGN_OR_RETURN(const int64_t is, part.Integer("split.no"));
  TREADLE_ASSIGN_OR_RETURN(const int64_t of, part.Integer("split.count"));
  TREADLE_ASSIGN_OR_RETURN(const int64_t all, part.Integer("split.tensors.count"));
  if (is == index && of == count && all == tensors) return absl::OkStatus();
  return InvalidArgument(part.path(), ": says that it is part ", is + 1, " of ", of, " with ", all,
                         " tensors in all, expected part ", index + 1, " of ", count, " with ",
                         tensors);
}

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<GgufFile>>> ReadGgufParts(const std::string& path) {
  std::vector<std::unique_ptr<GgufFile>> parts(1);
  TREADLE_ASSIGN_OR_RETURN(parts[0], GgufFile::Read(path));
  TREADLE_ASSIGN_OR_RETURN(const int64_t count, parts[0]->Integer("split.count", 1));
  if (count <= 1) return parts;
  TREADLE_ASSIGN_OR_RETURN(const int64_t index, parts[0]->Integer("split.no"));
  TREADLE_ASSIGN_OR_RETURN(const int64_t tensors, parts[0]->Integer("split.tensors.count"));
  if (count > kMaxParts || index < 0 || index >= count) {
    return InvalidArgument(path, ": says that it is part ", index + 1, " of ", count,
                           " (split.no, split.count), expected at most ", kMaxParts);
  }
  const std::string suffix = Suffix(index, count);
  if (!path.ends_with(suffix)) {
    return InvalidArgument(path, ": is part ", index + 1, " of ", count,
                           " files, expected a name that ends with ", suffix,
                           " and the others beside it");
  }
  const std::string prefix = path.substr(0, path.size() - suffix.size());
  std::unique_ptr<GgufFile> named = std::move(parts[0]);
  parts.resize(static_cast<size_t>(count));
  parts[index] = std::move(named);
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i != index) {
      const std::string other = prefix + Suffix(i, count);
      std::error_code error;
      if (!std::filesystem::exists(other, error)) {
        return NotFound(path, ": is one of ", count, " files, and part ", i + 1,
                        " is missing: ", other);
      }
      TREADLE_ASSIGN_OR_RETURN(parts[i], GgufFile::Read(other));
    }
    TREADLE_RETURN_IF_ERROR(CheckPart(*parts[i], i, count, tensors));
    found += parts[i]->tensors_in_file();
  }
  if (found == tensors) return parts;
  return InvalidArgument(path, ": its ", count, " files have ", found, " tensors, expected ",
                         tensors, " (split.tensors.count)");
}

}  // namespace treadle
