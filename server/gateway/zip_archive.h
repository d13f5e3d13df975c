// A ZIP archive in memory, of files as they are (method "stored"; PKWARE's APPNOTE, 4.3 and 4.4).
// A pure function.
#pragma once

#include <map>
#include <string>

namespace treadle {

// By name, in order, all with the earliest date that the format knows: equal files give equal
// bytes. Together below 4 GiB.
std::string ZipArchive(const std::map<std::string, std::string>& files);

}  // namespace treadle
