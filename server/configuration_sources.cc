#include "server/configuration_sources.h"

#include <unistd.h>

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
#include "base/nearest.h"
#include "base/quoted.h"
#include "base/status.h"

namespace treadle {
namespace {

std::string Trim(const std::string& text) { return std::string(absl::StripAsciiWhitespace(text)); }

constexpr std::string_view kPrefix = "TREADLE_";

// Variables that are no flag's: of this program, of its documentation, and of its scripts and
// tests, which start servers with all that they have been given themselves.
constexpr std::string_view kOtherVariables[] = {
    "TREADLE_API_KEY",        "TREADLE_BENCH",
    "TREADLE_CHAT_TEMPLATES", "TREADLE_CLOCK",
    "TREADLE_CONFIG",         "TREADLE_CPU_ISA",
    "TREADLE_CRDS",           "TREADLE_CUDA",
    "TREADLE_CUDA_CARVE_OUT", "TREADLE_CUDA_EARLY_LAUNCHES",
    "TREADLE_FUZZ_SEED",      "TREADLE_FUZZ_TARGET",
    "TREADLE_KERNEL_TABLE",   "TREADLE_KILLS",
    "TREADLE_RANDOM_SCHEMAS", "TREADLE_SOAK_SECONDS",
    "TREADLE_SOAK_SEED",      "TREADLE_WRITE_CHART",
    "TREADLE_WRITE_DIGESTS"};

// A variable that Kubernetes sets in every pod beside a service with such a name
// (TREADLE_SERVICE_HOST, TREADLE_PORT_8080_TCP_ADDR).
bool IsOfAService(std::string_view variable) {
  return variable.ends_with("_SERVICE_HOST") || variable.ends_with("_PORT") ||
         variable.find("_SERVICE_PORT") != variable.npos ||
         variable.find("_TCP") != variable.npos || variable.find("_UDP") != variable.npos;
}

const ServeFlag* FindFlag(std::string_view name) {
  for (const ServeFlag& flag : ServeFlags()) {
    if (name == flag.name + 2) return &flag;
  }
  return nullptr;
}

std::string VariableOf(const ServeFlag& flag) {
  std::string name = absl::AsciiStrToUpper(Str(kPrefix, flag.name + 2));
  std::ranges::replace(name, '-', '_');
  return name;
}

// A variable with our prefix that nobody reads was misspelt.
absl::Status CheckEnvironment() {
  std::vector<std::string> variables;
  for (const ServeFlag& flag : ServeFlags()) variables.push_back(VariableOf(flag));
  std::vector<std::string_view> known(std::begin(kOtherVariables), std::end(kOtherVariables));
  known.insert(known.end(), variables.begin(), variables.end());
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (!name.starts_with(kPrefix) || IsOfAService(name)) continue;
    if (std::ranges::find(known, name) != known.end()) continue;
    // Their common beginning makes no name more like another.
    for (std::string_view& other : known) other.remove_prefix(kPrefix.size());
    const std::string_view meant = NearestName(name.substr(kPrefix.size()), known);
    return InvalidArgument("the environment variable ", Quoted(name), " is no setting",
                           meant.empty() ? "" : Str("; did you mean '", kPrefix, meant, "'?"),
                           " (`treadle serve --help` has all flags)");
  }
  return absl::OkStatus();
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
      std::vector<std::string_view> names;
      for (const ServeFlag& known : ServeFlags()) names.emplace_back(known.name + 2);
      return InvalidArgument("--config: ", where, ": '", name, "' is no setting",
                             DidYouMean(name, names));
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
  TREADLE_RETURN_IF_ERROR(CheckEnvironment());
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
