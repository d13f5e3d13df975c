#include "server/cli/help/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/ascii.h"
#include "base/status.h"

namespace treadle {

bool HasColours(int fd) {
  const char* const no_colour = std::getenv("NO_COLOR");
  const char* const kind = std::getenv("TERM");
  if (no_colour != nullptr && *no_colour != '\0') return false;
  return isatty(fd) != 0 && (kind == nullptr || std::string_view(kind) != "dumb");
}

bool SpeaksUtf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* const value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    const std::string locale = absl::AsciiStrToLower(value);
    return locale.find("utf-8") != locale.npos || locale.find("utf8") != locale.npos;
  }
  return false;
}

int ColumnsOf(int fd, int otherwise) {
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : otherwise;
}

std::string Styled(std::string_view text, std::string_view style, bool colours) {
  return colours ? Str("\x1b[", style, "m", text, "\x1b[0m") : std::string(text);
}

}  // namespace treadle
