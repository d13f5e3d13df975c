# A port that passes bytes on, and mistreats them.
treadle_library(treadle_byte_proxy SOURCES ${CMAKE_CURRENT_LIST_DIR}/byte_proxy.cc DEPENDS treadle_base)
