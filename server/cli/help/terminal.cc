#include "server/cli/help/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>

#include "base/status.h"

namespace treadle {

bool HasColours(int fd) {
  const char* const no_colour = std::getenv("NO_COLOR");
  const char* const kind = std::getenv("TERM");
  if (no_colour != nullptr && *no_colour != '\0') return false;
  return isatty(fd) != 0 && (kind == nullptr || std::string_view(kind) != "dumb");
}

int ColumnsOf(int fd, int otherwise) {
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : otherwise;
}

std::string Styled(std::string_view text, std::string_view style, bool colours) {
  return colours ? Str("\x1b[", style, "m", text, "\x1b[0m") : std::string(text);
}

}  // namespace treadle
