// Terminals: whether a stream is one that shows colours, and how wide it is.
//
// Stateless.
#pragma once

#include <string>
#include <string_view>

namespace treadle {

// SGR parameters (ECMA-48, 8.3.117).
inline constexpr std::string_view kBold = "1", kDim = "2", kRed = "31", kGreen = "32",
                                  kYellow = "33", kCyan = "36";

// True for a terminal, unless NO_COLOR is set (no-color.org) or TERM is "dumb".
bool HasColours(int fd);

// Whether the locale's characters are UTF-8: LC_ALL, LC_CTYPE or LANG says so.
bool SpeaksUtf8();

// The terminal's width in characters; `otherwise` if it is none.
int ColumnsOf(int fd, int otherwise);

// `text` in that style, or as it is.
std::string Styled(std::string_view text, std::string_view style, bool colours);

}  // namespace treadle
