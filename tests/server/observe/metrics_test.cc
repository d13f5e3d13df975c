// The text of /metrics: vLLM's names, labels and buckets (vllm/v1/metrics/loggers.py and
// FinishReason of vllm/v1/engine/__init__.py, of 0.25), and what Prometheus' clients tell of a
// process (process_collector.py of the Python client).
#include "server/observe/metrics.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "base/status.h"
#include "scheduler/ledger.h"
#include "scheduler/request/request_pool.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using testing::Not;

// A request of 5 prompt tokens and 3 more, two of the first from the cache.
LedgerRecord SomeRecord(const std::string& reason) {
  LedgerRecord record;
  record.epoch = 1;
  record.free_pages = 30;
  record.total_pages = 40;
  record.members.push_back({.request = 1, .tokens = 20, .initiation = true});
  LedgerEnd end;
  end.request = 1;
  end.reason = reason;
  end.prompt_tokens = 5;
  end.output_tokens = 3;
  end.cached_tokens = 2;
  end.timings.queued = 0.4;
  end.timings.first_token = 0.7;
  end.timings.total = 4;
  record.ends.push_back(end);
  return record;
}

std::string Scraped(MetricsDialect dialect) {
  RequestPool pool(10);
  Metrics metrics("m", pool, {.dialect = dialect, .max_context = 60});
  for (const char* reason : {"stop", "length", "cancelled", "deadline", "refused", "error"}) {
    metrics.Record(SomeRecord(reason));
  }
  return metrics.Scrape();
}

std::set<std::string> Families(const std::string& text, const std::string& prefix) {
  std::set<std::string> names;
  const std::regex type("# TYPE (" + prefix + "\\S*) ");
  for (std::sregex_iterator at(text.begin(), text.end(), type), end; at != end; ++at) {
    names.insert((*at)[1]);
  }
  return names;
}

TEST(Metrics, HaveTheNamesOfTheirDialect) {
  for (const auto& [word, dialect] : kMetricsDialects) {
    const std::string text = Scraped(dialect);
    EXPECT_EQ(Families(text, "vllm:").size(),
              dialect == MetricsDialect::kTreadle ? 0 : VllmMetrics().size())
        << word;
    EXPECT_EQ(Families(text, "treadle:").empty(), dialect == MetricsDialect::kVllm) << word;
    EXPECT_FALSE(Families(text, "process_").empty()) << word;
  }
}

TEST(Metrics, HaveVllmsLabelsValuesAndReasons) {
  const std::string text = Scraped(MetricsDialect::kVllm);
  const std::string labels = R"({engine="0",model_name="m"} )";
  const auto line = [&](const std::string& name, const char* value) {
    // The labels' order means nothing.
    const std::string other = R"({model_name="m",engine="0"} )";
    EXPECT_THAT(text, testing::AnyOf(HasSubstr("\n" + name + labels + value + "\n"),
                                     HasSubstr("\n" + name + other + value + "\n")));
  };
  line("vllm:num_requests_running", "0");
  line("vllm:kv_cache_usage_perc", "0.25");
  line("vllm:prompt_tokens_total", "30");
  line("vllm:generation_tokens_total", "18");
  line("vllm:prefix_cache_queries_total", "30");
  line("vllm:prefix_cache_hits_total", "12");
  line("vllm:time_to_first_token_seconds_count", "6");
  line("vllm:e2e_request_latency_seconds_sum", "24");
  const std::regex reason(
      R"re(vllm:request_success_total\{[^}]*finished_reason="(\w+)"[^}]*\} (\d+))re");
  std::map<std::string, std::string> reasons;
  for (std::sregex_iterator at(text.begin(), text.end(), reason), end; at != end; ++at) {
    EXPECT_TRUE(reasons.emplace((*at)[1], (*at)[2]).second) << (*at)[1];
  }
  EXPECT_EQ(reasons, (std::map<std::string, std::string>{
                         {"stop", "1"}, {"length", "1"}, {"abort", "2"}, {"error", "2"}}));
}

TEST(Metrics, HaveVllmsBuckets) {
  const std::string text = Scraped(MetricsDialect::kBoth);
  const auto bounds = [&](const std::string& name) {
    std::string all;
    const std::regex bucket(name + R"re(_bucket\{[^}]*le="([^"]+)")re");
    for (std::sregex_iterator at(text.begin(), text.end(), bucket), end; at != end; ++at) {
      all += (*at)[1].str() + " ";
    }
    return all;
  };
  EXPECT_EQ(
      bounds("vllm:time_to_first_token_seconds"),
      "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 "
      "2560 +Inf ");
  EXPECT_EQ(bounds("vllm:inter_token_latency_seconds"),
            "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80 +Inf ");
  for (const char* name : {"e2e_request_latency_seconds", "request_queue_time_seconds",
                           "request_prefill_time_seconds", "request_decode_time_seconds"}) {
    EXPECT_EQ(bounds(Str("vllm:", name)),
              "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680 +Inf ");
  }
  EXPECT_EQ(bounds("vllm:iteration_tokens_total"),
            "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384 +Inf ");
  EXPECT_EQ(bounds("vllm:request_prompt_tokens"), "1 2 5 10 20 50 +Inf ");  // up to the context
  EXPECT_EQ(bounds("treadle:request_queue_time_seconds").substr(0, 10), "0.01 0.02 ");
}

// docs/metrics.md has a row for each, and no other.
TEST(Metrics, AreThoseOfThePage) {
  const std::string page = ReadWhole(TREADLE_SOURCE "/docs/metrics.md");
  std::set<std::string> told, known = {"vllm:cache_config_info"};
  const std::regex row("\n\\| `(vllm:\\w+)` \\|");
  for (std::sregex_iterator at(page.begin(), page.end(), row), end; at != end; ++at) {
    EXPECT_TRUE(told.insert((*at)[1]).second) << (*at)[1] << " is there twice";
  }
  for (const VllmMetric& metric : VllmMetrics()) known.insert(Str(kVllmMetrics, metric.name));
  EXPECT_EQ(told, known);
}

TEST(Metrics, AnInfoIsOneWithItsLabels) {
  RequestPool pool(10);
  Metrics metrics("m", pool);
  metrics.AddInfo("treadle:build_info", "Help.", {{"version", "1.2.3"}, {"backend", "cpu"}});
  EXPECT_THAT(metrics.Scrape(),
              HasSubstr("treadle:build_info{backend=\"cpu\",version=\"1.2.3\"} 1\n"));
}

double Process(const std::string& name) {
  RequestPool pool(10);
  const std::string text = Metrics("m", pool).Scrape();
  const size_t at = text.find("\n" + name + " ");
  EXPECT_NE(at, text.npos) << name << " is not in " << text;
  return at == text.npos ? -1 : std::stod(text.substr(at + name.size() + 2));
}

TEST(ProcessMetrics, AreTheProcesss) {
  const double files = Process("process_open_fds");
  const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(Process("process_open_fds"), files + 1);
  close(fd);
  EXPECT_EQ(Process("process_open_fds"), files);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(Process("process_max_fds"), static_cast<double>(limit.rlim_cur));

  // Memory that is touched is resident, and no more than all of it.
  const double resident = Process("process_resident_memory_bytes");
  constexpr size_t kBytes = 64 << 20;
  const std::vector<char> memory(kBytes, 1);
  EXPECT_GT(Process("process_resident_memory_bytes"), resident + kBytes / 2);
  EXPECT_GT(Process("process_virtual_memory_bytes"), Process("process_resident_memory_bytes"));

  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const double began = Process("process_start_time_seconds");
  EXPECT_LE(began, std::chrono::duration<double>(now).count() + 1);  // btime is of whole seconds
  EXPECT_GT(began, 1.6e9);                                           // 2020
  const double cpu = Process("process_cpu_seconds_total");
  EXPECT_GT(cpu, 0);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  EXPECT_LE(cpu, usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + 2.0);
}

}  // namespace
}  // namespace treadle
