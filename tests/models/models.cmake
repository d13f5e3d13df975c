if(TARGET treadle_models)
  treadle_test(model_test
    SOURCES model_test.cc teacher_forcing.cc
    DEPENDS treadle_models treadle_tiny_model treadle_cpu treadle_reference)
endif()
