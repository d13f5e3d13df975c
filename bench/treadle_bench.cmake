# treadle-bench, for who works on Treadle: not installed.
include(kernel_bench.cmake)
# The cost of the scheduler itself, with an engine that does nothing.
treadle_library(treadle_scheduler_bench
  SOURCES iteration/scheduler_bench.cc
  DEPENDS absl::str_format treadle_scheduler nlohmann_json::nlohmann_json)
treadle_library(treadle_quality_bench
  SOURCES quality/accuracy_bench.cc quality/int8_simulation.cc quality/planted_outliers.cc
  DEPENDS treadle_bench)

add_executable(treadle-bench cli/kernels.cc cli/load.cc cli/main.cc cli/quality.cc)
target_precompile_headers(treadle-bench REUSE_FROM treadle_headers_command)
target_compile_options(treadle-bench PRIVATE ${TREADLE_QUICK_OPTIONS})
target_link_libraries(treadle-bench PRIVATE
  treadle_command treadle_kernel_bench treadle_quality_bench treadle_scheduler_bench treadle_server)
set_target_properties(treadle-bench PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
