#include "server/cli/prefix_cache_disk.h"

#include <string>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "server/flag_values.h"

namespace treadle {
namespace {

// Times of reading a page and of computing it, and what follows.
std::string Compare(const PageFiles& files) {
  const auto [read, compute] = files.costs();
  if (read == 0) return "";
  std::string text = absl::StrFormat("; reading a page takes %.1f ms", 1e3 * read);
  if (compute == 0) return text + ", and what computing takes is not known yet";
  return text + absl::StrFormat(", computing it %.1f ms: pages are %s", 1e3 * compute,
                                read < compute ? "read" : "not read");
}

}  // namespace

absl::StatusOr<std::shared_ptr<PageFiles>> OpenPageFiles(const ServeOptions& options,
                                                         const OpenedModel& opened,
                                                         const LogSink& log) {
  const auto& [folder, bytes] = options.prefix_cache_disk;
  if (folder.empty()) return nullptr;
  const auto warn = [log](const std::string& what) {
    log({.severity = Severity::kWarning, .name = "prefix_cache_disk_trouble", .message = what});
  };
  TREADLE_ASSIGN_OR_RETURN(
      std::shared_ptr<PageFiles> files,
      PageFiles::Open({.folder = folder,
                       .max_bytes = bytes,
                       .model = opened.served.name,
                       .contents = Str(opened.numerics_key, "page size ", options.page_size, "\n"),
                       .page_size = options.page_size,
                       .page_bytes = opened.kv.bytes_per_page[PageKind::kWhole],
                       .warn = warn}));
  const PageFiles::Counters now = files->counters();
  log({.name = "prefix_cache_disk",
       .message = Str("prefix cache on disk: ", folder, " has ", now.pages, " pages of ",
                      options.page_size, " tokens, ", ShowBytes(now.bytes), " of ",
                      ShowBytes(bytes), Compare(*files)),
       .fields = {{"folder", folder},
                  {"pages", now.pages},
                  {"bytes", now.bytes},
                  {"read_seconds", files->costs().read},
                  {"compute_seconds", files->costs().compute}}});
  return files;
}

void AddPageFiles(const std::shared_ptr<PageFiles>& files, Metrics& metrics) {
  using Counters = PageFiles::Counters;
  if (files == nullptr) return;
  const auto now = [files](int64_t Counters::*member) {
    return [files, member] { return static_cast<double>(files->counters().*member); };
  };
  metrics.AddGauge("treadle:prefix_cache_disk_bytes", "Bytes of the prefix cache's files.",
                   now(&Counters::bytes));
  metrics.AddCounter("treadle:prefix_cache_disk_hits_total",
                     "Prompt tokens found in the prefix cache's files.", now(&Counters::hits));
  metrics.AddCounter("treadle:prefix_cache_disk_misses_total",
                     "Files of the prefix cache that were damaged or gone.",
                     now(&Counters::misses));
  metrics.AddCounter("treadle:prefix_cache_disk_stores_total",
                     "Pages written to the prefix cache's files.", now(&Counters::stores));
  metrics.AddCounter("treadle:prefix_cache_disk_dropped_total",
                     "Pages not written: too many waited, or the disk refused.",
                     now(&Counters::dropped));
}

}  // namespace treadle
