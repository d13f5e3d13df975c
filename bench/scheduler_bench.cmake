# What the scheduler itself costs, with an engine that does nothing.
treadle_library(treadle_scheduler_bench
  SOURCES scheduler_bench.cc
  DEPENDS treadle_scheduler)
