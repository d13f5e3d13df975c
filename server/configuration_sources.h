// Where the values of serve's flags come from: the command line, then the environment
// (TREADLE_MAX_QUEUE for --max-queue), then a file; what comes first wins.
//
// The file has one "name = value" per line, with the names of the flags and their values as on the
// command line; a line that begins with # is a comment. A name that is no flag is an error, and so
// is one that is there twice. Variables that are no flag's are other programs' business.
//
// Thread safety: pure, but for the environment.
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "server/configuration.h"

namespace treadle {

struct Setting {
  std::string value;   // as it was written
  std::string source;  // "the command line", "TREADLE_LISTEN", "/etc/treadle.conf line 3"
};
using Settings = std::map<std::string, Setting>;  // by flag, "--listen"

// "name = value" lines; errors name file and line, and for a wrong name the nearest right one.
absl::StatusOr<Settings> ReadSettingsFile(const std::string& path);

// The options that PrintSettings' text means, without the environment's. Errors name line and flag.
absl::StatusOr<ServeOptions> OptionsFrom(const std::string& text);

// Reads into `options` what the command line left open: from the environment, and from `file`
// unless that is empty. `given`: the command line's settings, already in `options`. Returns all of
// them; errors name flag and source.
absl::StatusOr<Settings> ApplySources(Settings given, const std::string& file,
                                      ServeOptions& options);

// A file for ReadSettingsFile that means the same, with every default as a comment.
std::string PrintSettings(const Settings& settings, const ServeOptions& options);

}  // namespace treadle
