# Weight formats, the sampler's definition, the reference backend and the op-case list itself.
treadle_test(formats_test SOURCES formats_test.cc matrix_slice_test.cc DEPENDS treadle_formats treadle_op_cases)
treadle_test(sampling_test SOURCES sampling_test.cc
  DEPENDS treadle_reference nlohmann_json::nlohmann_json)
treadle_test(reference_test SOURCES reference_test.cc
  DEPENDS treadle_reference nlohmann_json::nlohmann_json)
# Whether what an op left behind is right.
treadle_library(treadle_op_checks
  SOURCES op_checks.cc
  DEPENDS treadle_op_cases treadle_op_tolerances)
treadle_test(op_cases_test SOURCES op_cases_test.cc DEPENDS treadle_op_checks)
treadle_test(quantize_test SOURCES quantize_test.cc quantize_spec_test.cc
  DEPENDS treadle_formats nlohmann_json::nlohmann_json)
treadle_test(gptq_test SOURCES gptq_test.cc DEPENDS treadle_formats nlohmann_json::nlohmann_json)
