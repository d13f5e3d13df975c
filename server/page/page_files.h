// The page's files (HTML, CSS, JavaScript), kept in the binary: embed.cmake makes the table from
// the sources of this folder. Constant; any thread.
#pragma once

#include <span>
#include <string_view>

namespace treadle {

struct PageFile {
  std::string_view path;  // "/", "/page/chat.js"
  std::string_view content_type;
  std::string_view etag;  // of HTTP, with its quotes; another one whenever the bytes are others
  std::string_view bytes;
};

std::span<const PageFile> EmbeddedFiles();

}  // namespace treadle
