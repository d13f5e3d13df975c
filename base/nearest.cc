#include "base/nearest.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "base/status.h"

namespace treadle {

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replace = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replace, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::string_view NearestName(std::string_view name, std::span<const std::string_view> names) {
  std::string_view nearest;
  size_t least = (std::min(name.size(), size_t{100}) + 2) / 3;  // no word is as long as 100
  for (const std::string_view other : names) {
    if (other.size() > name.size() + least || name.size() > other.size() + least) continue;
    const size_t distance = EditDistance(name, other);
    if (distance >= least) continue;
    least = distance;
    nearest = other;
  }
  return nearest;
}

std::string DidYouMean(std::string_view name, std::span<const std::string_view> names) {
  const std::string_view nearest = NearestName(name, names);
  return nearest.empty() || nearest == name ? "" : Str("; did you mean '", nearest, "'?");
}

}  // namespace treadle
