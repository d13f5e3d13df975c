# Decides whether this build has CUDA, and enables the language where every target can be linked.
# Sets TREADLE_HAS_CUDA.
set(TREADLE_CUDA AUTO CACHE STRING "The CUDA backend: AUTO (if nvcc is there), ON or OFF")
set(TREADLE_CUDA_ARCHITECTURES "90a-real;80-virtual" CACHE STRING
  "GPUs to generate code for, as CMAKE_CUDA_ARCHITECTURES; 'all': those that packages are for")
if(TREADLE_CUDA_ARCHITECTURES STREQUAL "all")
  # Code for 8.0 runs on 8.6, too; what is later than 10.0 gets its code from the driver.
  set(TREADLE_CUDA_ARCHITECTURES "80-real;89-real;90a-real;100-real;100-virtual")
endif()
set_property(CACHE TREADLE_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT TREADLE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TREADLE_CUDA is '${TREADLE_CUDA}', expected AUTO, ON or OFF")
endif()

set(TREADLE_HAS_CUDA OFF)
if(TREADLE_CUDA STREQUAL "OFF")
  message(STATUS "CUDA backend: off (TREADLE_CUDA=OFF)")
elseif(TREADLE_CUDA STREQUAL "AUTO" AND NOT TREADLE_SANITIZER STREQUAL "")
  message(STATUS "CUDA backend: off (a build with a sanitizer checks kernels by emulation)")
else()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES ${TREADLE_CUDA_ARCHITECTURES})
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    if(TREADLE_CCACHE)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${TREADLE_CCACHE})
    endif()
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 or so does not know it
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    # CMake 3.25 stumbles over CUDA 13, which has no nvToolsExt, in projects that require CMake 3.25.
    set(required ${CMAKE_MINIMUM_REQUIRED_VERSION})
    set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
    find_package(CUDAToolkit REQUIRED)
    set(CMAKE_MINIMUM_REQUIRED_VERSION ${required})
    set(TREADLE_HAS_CUDA ON)
    message(STATUS "CUDA backend: on (nvcc ${CMAKE_CUDA_COMPILER_VERSION}, architectures "
                   "${TREADLE_CUDA_ARCHITECTURES})")
  elseif(TREADLE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TREADLE_CUDA=ON, but CMake found no nvcc")
  else()
    message(STATUS "CUDA backend: off (no nvcc; kernels are checked by emulation)")
  endif()
endif()

# How .cu files of a target are compiled.
function(treadle_cuda_options target)
  set_target_properties(${target} PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-fmad=false;-Xcompiler=-ffp-contract=off>")
endfunction()
