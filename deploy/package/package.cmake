# The files that `cmake --install` puts under a prefix, and that `cpack -G DEB` packs for Debian.
# Nothing installed names a folder of the build; the unit learns the prefix when it is installed.
#
# Components: treadle goes everywhere; license, debian: where LICENSE is, a package has Debian's
# copyright and changelog, and a configuration file in /etc.
set(TREADLE_PACKAGE_MAINTAINER "Treadle maintainers <maintainers@treadle.invalid>" CACHE STRING
  "Who answers for the Debian package: name and address")

set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME treadle)
install(TARGETS treadle RUNTIME DESTINATION bin)
install(FILES deploy/grafana/treadle.json DESTINATION share/treadle/grafana)
install(FILES deploy/prometheus/alerts.yaml deploy/prometheus/prometheus.yaml
  DESTINATION share/treadle/prometheus)
install(FILES deploy/nginx/grpc.conf DESTINATION share/treadle/nginx)
# With its folder: clients run protoc -I share/treadle/proto.
install(FILES server/grpc/inference.proto server/grpc/rpc_details.proto DESTINATION share/treadle/proto/server)
install(FILES README.md DESTINATION share/doc/treadle)
install(DIRECTORY docs DESTINATION share/doc/treadle)
install(FILES deploy/README.md DESTINATION share/doc/treadle/deploy)
install(CODE "
  get_filename_component(TREADLE_BINDIR \"\${CMAKE_INSTALL_PREFIX}/bin\" ABSOLUTE)
  configure_file([[${CMAKE_SOURCE_DIR}/deploy/systemd/treadle.service.in]]
    [[${CMAKE_BINARY_DIR}/treadle.service]] @ONLY)")
install(FILES ${CMAKE_BINARY_DIR}/treadle.service DESTINATION lib/systemd/system)
# The man page and completions, which the program prints.
install(CODE "
  set(program [[${CMAKE_BINARY_DIR}/treadle]])
  execute_process(COMMAND \${program} help --man COMMAND gzip -9nc
    OUTPUT_FILE [[${CMAKE_BINARY_DIR}/treadle.1.gz]] COMMAND_ERROR_IS_FATAL ANY)
  foreach(shell bash zsh fish)
    execute_process(COMMAND \${program} completions \${shell}
      OUTPUT_FILE \"${CMAKE_BINARY_DIR}/completions.\${shell}\" COMMAND_ERROR_IS_FATAL ANY)
  endforeach()")
install(FILES ${CMAKE_BINARY_DIR}/treadle.1.gz DESTINATION share/man/man1)
install(FILES ${CMAKE_BINARY_DIR}/completions.bash
  DESTINATION share/bash-completion/completions RENAME treadle)
install(FILES ${CMAKE_BINARY_DIR}/completions.zsh DESTINATION share/zsh/vendor-completions RENAME _treadle)
install(FILES ${CMAKE_BINARY_DIR}/completions.fish
  DESTINATION share/fish/vendor_completions.d RENAME treadle.fish)
install(FILES LICENSE DESTINATION share/doc/treadle COMPONENT license)

set(debian ${CMAKE_SOURCE_DIR}/deploy/package)
install(FILES ${debian}/copyright DESTINATION share/doc/treadle COMPONENT debian EXCLUDE_FROM_ALL)
install(CODE "execute_process(COMMAND gzip -9nc [[${debian}/changelog]]
  OUTPUT_FILE [[${CMAKE_BINARY_DIR}/changelog.gz]] COMMAND_ERROR_IS_FATAL ANY)"
  COMPONENT debian EXCLUDE_FROM_ALL)
install(FILES ${CMAKE_BINARY_DIR}/changelog.gz DESTINATION share/doc/treadle
  COMPONENT debian EXCLUDE_FROM_ALL)
install(FILES ${debian}/env DESTINATION /etc/treadle COMPONENT debian EXCLUDE_FROM_ALL)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME treadle)
set(CPACK_INSTALL_CMAKE_PROJECTS
  "${CMAKE_BINARY_DIR};treadle;treadle;/" "${CMAKE_BINARY_DIR};treadle;debian;/")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
  OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "${TREADLE_PACKAGE_MAINTAINER}")
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION
  "serving engine for transformer language models
Treadle schedules one iteration of the model at a time: a request joins the
very next iteration, and one that ends leaves at once. Clients speak gRPC or
OpenAI's HTTP API.

It is not started until there is a model: link one to /etc/treadle/model,
then enable treadle.service. Its settings are in /etc/treadle/env.")
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "nginx, prometheus")
if(TREADLE_HAS_CUDA)  # opened at run time, so nothing links to them
  set(cuda ${CUDAToolkit_VERSION_MAJOR}-${CUDAToolkit_VERSION_MINOR})
  set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "libcublas-${cuda}, libnccl2")
endif()
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA
  ${debian}/postinst ${debian}/prerm ${debian}/postrm ${debian}/conffiles)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
