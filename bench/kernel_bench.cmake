# The kernel benchmark. Its loops for the machine's ceilings are compiled per instruction set.
find_package(nlohmann_json REQUIRED)
set(cuda_peaks no_cuda_peaks.cc)
if(TREADLE_HAS_CUDA)
  set(cuda_peaks cuda_peaks.cc)
endif()
treadle_library(treadle_kernel_bench
  SOURCES cold_products.cc kernel_bench.cc layer_cases.cc machine_peaks.cc ${cuda_peaks}
  DEPENDS treadle_cpu treadle_cuda_backend treadle_reference treadle_models treadle_op_cases
    nlohmann_json::nlohmann_json)
treadle_isa_sources(treadle_kernel_bench peak_loops.cc)
