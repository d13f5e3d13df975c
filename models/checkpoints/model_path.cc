#include "models/checkpoints/model_path.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>

#include "base/mapped_file.h"
#include "base/status.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kRepository = "models--", kBetween = "--";

fs::path HubCache() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return fs::path(value == nullptr ? "" : value);
  };
  if (const fs::path cache = variable("HF_HUB_CACHE"); !cache.empty()) return cache;
  if (const fs::path home = variable("HF_HOME"); !home.empty()) return home / "hub";
  const fs::path user = variable("XDG_CACHE_HOME");
  return (user.empty() ? variable("HOME") / ".cache" : user) / "huggingface" / "hub";
}

// ORG/NAME, as the hub allows it.
bool IsHubName(std::string_view text) {
  const auto allowed = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.' ||
           c == '/';
  };
  return std::ranges::count(text, '/') == 1 && text.front() != '/' && text.back() != '/' &&
         text.front() != '.' && std::ranges::all_of(text, allowed) && !text.ends_with(".gguf");
}

// The folder of a repository's main branch in the cache, else of any; or its only .gguf file.
std::optional<fs::path> InHubCache(const std::string& name) {
  const size_t slash = name.find('/');
  const fs::path repository =
      HubCache() / Str(kRepository, name.substr(0, slash), kBetween, name.substr(slash + 1));
  std::error_code error;
  std::string commit;
  if (const auto main = MappedFile::Open(repository / "refs" / "main"); main.ok()) {
    commit = (*main)->text().substr(0, (*main)->text().find_first_of(" \t\r\n"));
  }
  fs::path folder = repository / "snapshots" / commit;
  if (commit.empty() || !fs::is_directory(folder, error)) {
    const fs::directory_iterator any(repository / "snapshots", error);
    if (error || any == fs::directory_iterator()) return std::nullopt;
    folder = any->path();
  }
  if (fs::exists(folder / "config.json", error)) return folder;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".gguf") return entry.path();
  }
  return folder;
}

// Without the "-00001-of-00003" of a split model's part.
std::string WithoutPart(std::string name) {
  constexpr std::string_view kPart = "-#####-of-#####";  // '#': a digit
  if (name.size() <= kPart.size()) return name;
  const size_t begin = name.size() - kPart.size();
  for (size_t i = 0; i < kPart.size(); ++i) {
    const char c = name[begin + i];
    if (kPart[i] == '#' ? std::isdigit(static_cast<unsigned char>(c)) == 0 : c != kPart[i]) {
      return name;
    }
  }
  return name.substr(0, begin);
}

}  // namespace

std::string ModelNameOf(const std::string& path) {
  std::error_code error;
  fs::path whole = fs::absolute(path, error).lexically_normal();
  if (whole.filename().empty()) whole = whole.parent_path();
  if (!fs::is_directory(whole, error)) {
    return whole.extension() == ".gguf" ? WithoutPart(whole.stem().string())
                                        : whole.filename().string();
  }
  const std::string repository = whole.parent_path().parent_path().filename().string();
  if (whole.parent_path().filename() == "snapshots" && repository.starts_with(kRepository)) {
    std::string name = repository.substr(kRepository.size());
    const size_t between = name.find(kBetween);
    return between == name.npos ? name : name.replace(between, kBetween.size(), "/");
  }
  return whole.filename().string();
}

absl::Status NoModelAt(const std::string& path) {
  constexpr std::string_view kExpected = "expected a .gguf file or a Hugging Face folder";
  if (path.find("://") != path.npos) {
    return InvalidArgument(path, ": cannot be opened: it is a URL, ", kExpected,
                           " of this machine: fetch the model first, and name its path");
  }
  const std::string none = path + ": cannot be opened: there is no such file or folder";
  if (path.find('/') == path.npos && !path.ends_with(".gguf")) {
    return NotFound(none, ", ", kExpected, ": scripts/fetch_model.sh, beside Treadle's sources, ",
                    "fetches the default model, and gemma-3-270m by that name; it prints the path");
  }
  if (!IsHubName(path)) return NotFound(none, ", ", kExpected);
  if (const auto cached = InHubCache(path)) {
    return NotFound(none, "; the hub's cache has that model: name ", cached->string());
  }
  return NotFound(none, ", nor is such a model in the hub's cache (", HubCache().string(), "), ",
                  kExpected, ": `hf download ", path, "` fetches it, and prints the path to name");
}

}  // namespace treadle
