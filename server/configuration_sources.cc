#include "server/configuration_sources.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "base/edit_distance.h"
#include "base/status.h"

namespace treadle {
namespace {

std::string Trim(const std::string& text) { return std::string(absl::StripAsciiWhitespace(text)); }

const ServeFlag* FindFlag(std::string_view name) {
  for (const ServeFlag& flag : ServeFlags()) {
    if (name == flag.name + 2) return &flag;
  }
  return nullptr;
}

std::string NearestName(std::string_view name) {
  const auto distance = [&](const ServeFlag& flag) { return EditDistance(name, flag.name + 2); };
  return std::ranges::min_element(ServeFlags(), {}, distance)->name + 2;
}

std::string VariableOf(const ServeFlag& flag) {
  std::string name = absl::AsciiStrToUpper(Str("TREADLE_", flag.name + 2));
  std::ranges::replace(name, '-', '_');
  return name;
}

// `path`: for errors.
absl::StatusOr<Settings> ReadSettings(std::istream& file, const std::string& path) {
  Settings settings;
  std::string text;
  for (int number = 1; std::getline(file, text); ++number) {
    const std::string line = Trim(text);
    if (line.empty() || line[0] == '#') continue;
    const std::string where = Str(path, " line ", number);
    const size_t equals = line.find('=');
    if (equals == line.npos) {
      return InvalidArgument("--config: ", where, " is '", line, "', expected name = value");
    }
    const std::string name = Trim(line.substr(0, equals));
    const ServeFlag* flag = FindFlag(name);
    if (flag == nullptr) {
      return InvalidArgument("--config: ", where, ": '", name,
                             "' is no setting; the nearest one is '", NearestName(name), "'");
    }
    const auto [known, fresh] =
        settings.try_emplace(flag->name, Setting{Trim(line.substr(equals + 1)), where});
    if (!fresh) {
      return InvalidArgument("--config: ", where, ": '", name, "' is there twice, before in ",
                             known->second.source);
    }
  }
  if (!file.eof())
    return InvalidArgument("--config: cannot read ", path, ": ", std::strerror(errno));
  return settings;
}

absl::Status ReadInto(const ServeFlag& flag, const Setting& setting, ServeOptions& options) {
  const absl::Status read = flag.value.read(options, setting.value);
  if (read.ok()) return read;
  return InvalidArgument(flag.name, " (", setting.source, ") ", std::string(read.message()));
}

}  // namespace

absl::StatusOr<Settings> ReadSettingsFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return InvalidArgument("--config: cannot read ", path, ": ", std::strerror(errno));
  return ReadSettings(file, path);
}

absl::StatusOr<ServeOptions> OptionsFrom(const std::string& text) {
  std::istringstream lines(text);
  TREADLE_ASSIGN_OR_RETURN(const Settings settings, ReadSettings(lines, "the configuration"));
  ServeOptions options;
  for (const ServeFlag& flag : ServeFlags()) {
    const auto setting = settings.find(flag.name);
    if (setting == settings.end()) continue;
    TREADLE_RETURN_IF_ERROR(ReadInto(flag, setting->second, options));
  }
  return options;
}

absl::StatusOr<Settings> ApplySources(Settings given, const std::string& path,
                                      ServeOptions& options) {
  Settings file;
  if (!path.empty()) {
    TREADLE_ASSIGN_OR_RETURN(file, ReadSettingsFile(path));
  }
  for (const ServeFlag& flag : ServeFlags()) {
    if (given.contains(flag.name)) continue;
    const std::string variable = VariableOf(flag);
    const char* const value = std::getenv(variable.c_str());
    const auto in_file = file.find(flag.name);
    if (value == nullptr && in_file == file.end()) continue;
    Setting setting = value != nullptr ? Setting{value, variable} : in_file->second;
    TREADLE_RETURN_IF_ERROR(ReadInto(flag, setting, options));
    given[flag.name] = std::move(setting);
  }
  return given;
}

std::string PrintSettings(const Settings& settings, const ServeOptions& options) {
  std::string text = "# treadle serve --config THIS_FILE\n";
  for (const ServeFlag& flag : ServeFlags()) {
    text += Str("\n# ", flag.help, "\n");
    const auto found = settings.find(flag.name);
    if (found == settings.end()) {
      text += Str("# by default: ", flag.name + 2, " = ", flag.value.show(options), "\n");
    } else {
      text += Str("# from ", found->second.source, "\n", flag.name + 2, " = ", found->second.value,
                  "\n");
    }
  }
  return text;
}

}  // namespace treadle
