# What the scheduler itself costs, with an engine that does nothing; and a timeline of an engine under a scheduler.
treadle_library(treadle_scheduler_bench
  SOURCES iteration/scheduler_bench.cc iteration/timeline.cc
  DEPENDS absl::str_format treadle_scheduler nlohmann_json::nlohmann_json)
