#include "models/json_file.h"

#include "kernels/status.h"
#include "models/mapped_file.h"

namespace treadle {
namespace {

constexpr int kDeepest = 64;

}  // namespace

absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& path) {
  // A parser's recursion follows the text's nesting: bounded, so that no file can exhaust the
  // stack.
  const auto shallow = [](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    return depth <= kDeepest;
  };
  nlohmann::json value = nlohmann::json::parse(text, shallow, /*allow_exceptions=*/false);
  if (!value.is_object()) return InvalidArgument(path, ": expected a JSON object");
  return value;
}

absl::StatusOr<nlohmann::json> ReadJsonFile(const std::string& path) {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<MappedFile> file, MappedFile::Open(path));
  return ParseJsonObject(
      {reinterpret_cast<const char*>(file->bytes().data()), file->bytes().size()}, path);
}

}  // namespace treadle
