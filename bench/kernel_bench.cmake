# The kernel benchmark. Its loops for the machine's ceilings are compiled per instruction set.
find_package(nlohmann_json REQUIRED)
treadle_library(treadle_kernel_bench
  SOURCES kernel_bench.cc machine_peaks.cc
  DEPENDS treadle_cpu treadle_reference treadle_op_cases nlohmann_json::nlohmann_json)
treadle_isa_sources(treadle_kernel_bench peak_loops.cc)
