# The op-case list: inputs, tolerances and checks of every backend op.
set(TREADLE_OP_CASES_DIR ${CMAKE_CURRENT_LIST_DIR})
treadle_library(treadle_op_cases
  SOURCES
    ${TREADLE_OP_CASES_DIR}/op_cases.cc
    ${TREADLE_OP_CASES_DIR}/op_case_list.cc
    ${TREADLE_OP_CASES_DIR}/random_matrix.cc
    ${TREADLE_OP_CASES_DIR}/feature_op_runs.cc
    ${TREADLE_OP_CASES_DIR}/weight_op_runs.cc
    ${TREADLE_OP_CASES_DIR}/kv_op_runs.cc
    ${TREADLE_OP_CASES_DIR}/sample_op_run.cc
  DEPENDS treadle_base treadle_formats treadle_reference)
