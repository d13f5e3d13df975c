# The way between stages, and which layers they get.
treadle_test(engine_link_test
  SOURCES activation_link_test.cc activation_link_fault_test.cc link_pipeline.cc wire_codec_test.cc
  DEPENDS treadle_engine treadle_reference treadle_collectives treadle_gloo treadle_ranks_support)
treadle_test(engine_placement_test
  SOURCES placement_test.cc placement_costs_test.cc
  DEPENDS treadle_engine treadle_models treadle_cpu treadle_reference treadle_tiny_model)
