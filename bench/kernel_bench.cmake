# The kernel benchmark. Its loops for the machine's ceilings are compiled per instruction set.
find_package(nlohmann_json REQUIRED)
set(on_gpus no_cuda.cc)
if(TREADLE_HAS_CUDA)
  set(on_gpus cuda_peaks.cc int8_baseline.cc library_int8.cu)
endif()
treadle_library(treadle_kernel_bench
  SOURCES cold_products.cc kernel_bench.cc layer_cases.cc machine_peaks.cc ${on_gpus}
  DEPENDS treadle_cpu treadle_cuda_backend treadle_reference treadle_models treadle_op_cases
    nlohmann_json::nlohmann_json)
treadle_isa_sources(treadle_kernel_bench peak_loops.cc)
if(TREADLE_HAS_CUDA)
  treadle_cuda_options(treadle_kernel_bench)
endif()
