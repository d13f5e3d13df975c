# An engine without a model that checks every plan, and a clock that a test moves.
treadle_library(treadle_fake_engine
  SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/fake_clock.cc
    ${CMAKE_CURRENT_LIST_DIR}/fake_engine.cc
  DEPENDS treadle_scheduler)
