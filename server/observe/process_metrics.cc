#include "server/observe/process_metrics.h"

#include <prometheus/metric_family.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>

namespace treadle {
namespace {

using prometheus::MetricType;

// The numbered words of /proc/self/stat behind the command's name, which may have blanks itself;
// proc(5) counts from 1, and the third is the first behind the name.
std::optional<double> Stat(int number) {
  std::ifstream file("/proc/self/stat");
  std::string text(std::istreambuf_iterator<char>(file), {});
  const size_t end = text.rfind(')');
  if (end == text.npos) return std::nullopt;
  std::istringstream words(text.substr(end + 1));
  std::string word;
  for (int i = 3; i <= number; ++i) words >> word;
  double value = 0;
  if (!(std::istringstream(word) >> value)) return std::nullopt;
  return value;
}

// Seconds since 1970 at which the system was started.
std::optional<double> BootTime() {
  std::ifstream file("/proc/stat");
  for (std::string word; file >> word;) {
    double time = 0;
    if (word == "btime" && file >> time) return time;
  }
  return std::nullopt;
}

std::optional<double> OpenFiles() {
  std::error_code error;
  double files = -1;  // not the one that lists them
  for (std::filesystem::directory_iterator at("/proc/self/fd", error), end; !error && at != end;
       at.increment(error)) {
    ++files;
  }
  if (error) return std::nullopt;
  return files;
}

}  // namespace

void AddProcessMetrics(std::vector<prometheus::MetricFamily>& families) {
  const auto add = [&](const char* name, const char* help, MetricType type,
                       std::optional<double> value) {
    if (!value) return;
    prometheus::ClientMetric metric;
    (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = *value;
    families.push_back({name, help, type, {std::move(metric)}});
  };
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  add("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.",
      MetricType::Counter, seconds(usage.ru_utime) + seconds(usage.ru_stime));
  const double page = static_cast<double>(sysconf(_SC_PAGESIZE));
  add("process_virtual_memory_bytes", "Virtual memory size in bytes.", MetricType::Gauge, Stat(23));
  const std::optional<double> resident = Stat(24);
  add("process_resident_memory_bytes", "Resident memory size in bytes.", MetricType::Gauge,
      resident ? std::optional(*resident * page) : std::nullopt);
  const std::optional<double> boot = BootTime(), ticks = Stat(22);
  add("process_start_time_seconds", "Start time of the process since unix epoch in seconds.",
      MetricType::Gauge,
      boot && ticks ? std::optional(*boot + *ticks / static_cast<double>(sysconf(_SC_CLK_TCK)))
                    : std::nullopt);
  add("process_open_fds", "Number of open file descriptors.", MetricType::Gauge, OpenFiles());
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  add("process_max_fds", "Maximum number of open file descriptors.", MetricType::Gauge,
      static_cast<double>(files.rlim_cur));
}

}  // namespace treadle
