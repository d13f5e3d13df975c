#include "engine/replay_log.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/status.h"

namespace treadle {

int64_t ReplayLog::PagesIn(int64_t bytes, const Options& options) {
  const auto row = static_cast<int64_t>(EncodedBytes(options.wire, 1, options.hidden));
  return std::min(options.pages, bytes / (row * options.page_size));
}

absl::StatusOr<ReplayLog> ReplayLog::Create(const Options& options) {
  ReplayLog log(options);
  const size_t bytes = static_cast<size_t>(options.pages * options.page_size) * log.row_bytes_;
  if (options.memory != nullptr) {
    TREADLE_ASSIGN_OR_RETURN(log.rows_, options.memory->Take(bytes));
    return log;
  }
  log.rows_ = Buffer(std::calloc(bytes, 1), bytes, std::free);
  if (log.rows_.data() != nullptr) return log;
  return ResourceExhausted("no memory for a replay log of ", bytes, " bytes");
}

bool ReplayLog::Holds(std::span<const int32_t> pages, int64_t end) const {
  const auto count = static_cast<size_t>((end + options_.page_size - 1) / options_.page_size);
  return count <= pages.size() && std::ranges::all_of(pages.first(count), [&](int32_t page) {
           return page < options_.pages;
         });
}

// Null where it has no page.
std::byte* ReplayLog::At(std::span<const int32_t> pages, int64_t position) const {
  const auto index = static_cast<size_t>(position / options_.page_size);
  if (index >= pages.size() || pages[index] >= options_.pages) return nullptr;
  const int64_t row = pages[index] * options_.page_size + position % options_.page_size;
  return rows_.data() + static_cast<size_t>(row) * row_bytes_;
}

void ReplayLog::Write(std::span<const int32_t> pages, int64_t first, const Tensor& rows) {
  for (int64_t done = 0, count = 0; done < rows.rows; done += count) {
    const int64_t position = first + done;
    count = std::min(rows.rows - done, options_.page_size - position % options_.page_size);
    if (std::byte* const at = At(pages, position)) {
      EncodeRows(options_.wire, rows.Rows(done, count), at);
    }
  }
}

std::byte* ReplayLog::Read(std::span<const int32_t> pages, int64_t first, int64_t count,
                           std::byte* out) const {
  for (int64_t position = first; position < first + count; ++position) {
    std::memcpy(out, At(pages, position), row_bytes_);
    out += row_bytes_;
  }
  return out;
}

}  // namespace treadle
